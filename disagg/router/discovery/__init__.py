"""Engines that come and go while the router serves: where they are found, and how they leave."""
