"""Small decoders with random weights, for the tests of models."""
