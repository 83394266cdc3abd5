"""Break a running system on purpose and check that every answer is right or an error."""
