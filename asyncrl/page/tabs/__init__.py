"""The tabs of the page: functions from a run to the values of a template."""
