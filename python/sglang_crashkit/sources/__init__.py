"""The sources of events: incidents, and text such as logs."""
