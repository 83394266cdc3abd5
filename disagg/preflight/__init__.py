"""What can be known before anything is started: checks, and the resolved plan."""
