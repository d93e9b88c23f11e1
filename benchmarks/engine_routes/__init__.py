"""The cost of recording and sending routes of experts, for an engine alone."""
