"""SGLang and others import this module, with which TorchAir teaches GE all-reduces; this backend runs them as they are."""
