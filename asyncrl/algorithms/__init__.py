"""The mathematics of the losses and advantages: functions of tensors that return tensors.

They know neither samples nor engines.  Import the module that is needed.
"""
