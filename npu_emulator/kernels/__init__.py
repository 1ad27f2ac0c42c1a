"""The kernels of the emulated device: how every operator of the dispatcher gets one."""
