"""Put on `PYTHONPATH` of the engine's processes."""
