"""One readable top-to-bottom main for each command."""
