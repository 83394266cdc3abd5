"""Break a running system on purpose; every answer must be right or an error."""
