"""Check the answers again: a replay file and an overridden `__check` skip the first check.

The check runs while this file is rendered, so that no answer ever becomes part of any code.
{{ cookiecutter | check_answers }}
"""
