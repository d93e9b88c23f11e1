"""The time in which the page of a large run opens and answers."""
