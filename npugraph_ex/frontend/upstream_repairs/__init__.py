"""Repairs of faults in torch and torch_npu. A module has one repair and says what is wrong, in which torch, and when it may go."""
