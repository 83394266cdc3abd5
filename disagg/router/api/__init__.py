"""The OpenAI and Anthropic APIs: paths, bodies, event streams, errors."""
