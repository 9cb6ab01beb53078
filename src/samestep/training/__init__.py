"""`Training`: a run of any script, which resumes, logs, saves and evaluates."""
