"""User code in processes: episodes and rewards written with ``async def``, apart from the controller's event loop."""
