"""How fast engines are, as `disagg plan` wants it, and whether its predictions hold."""
