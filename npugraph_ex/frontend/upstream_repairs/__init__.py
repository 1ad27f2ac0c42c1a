"""Repairs of faults in Dynamo and AOT. Each module has one repair and says what is wrong, in which torch, and when it may go."""
