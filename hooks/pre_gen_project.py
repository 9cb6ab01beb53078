"""Refuse a replay file that turns the template's own filters off, and its checks with them.

They check all answers before the folder is made; see check_context in template_filters.py.
"""

import sys

if "{{ 'check_context' is filter }}" != "True":
    sys.exit(
        "_extensions: not what this template says. Leave it out, or answer the questions again."
    )
