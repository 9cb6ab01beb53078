"""The processes of a run: how they meet, agree, fail together and end."""
