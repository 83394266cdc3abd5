"""The model of a lease that grows: a consumer that fetches a prompt while it is computed."""
