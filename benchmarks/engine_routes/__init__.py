"""What recording and sending routes of experts costs an engine."""
