"""What transports need of the operating system."""
