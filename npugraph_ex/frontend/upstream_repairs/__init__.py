"""Repairs of what Dynamo and AOT get wrong, one module a repair: what is wrong, in which torch, and when it may go."""
