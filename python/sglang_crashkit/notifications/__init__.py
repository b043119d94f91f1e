"""Tell others of an incident that is whole: a command of the user's, a web hook. In a process beside the handler."""
