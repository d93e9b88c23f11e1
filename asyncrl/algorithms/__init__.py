"""The mathematics: tensors in, tensors out.  Knows neither samples nor engines; import the module that is needed."""
