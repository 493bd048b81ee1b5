"""Compute the memory, communication, time, and price of a run under each strategy.

No weights are loaded, and the devices do not have to exist on this machine.
"""
