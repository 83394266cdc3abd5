"""The model of one producer and its consumers: who may read which block when."""
