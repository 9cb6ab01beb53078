"""Rows of data from files, the Hub and demos: sources, tables, labels."""
