"""What the kit knows of processes, stacks and incidents: data, and no judgement.

Here stands what is needed to print an incident, which starts without the model of all that may stand in one.
"""

#: Of ``incident.json``; it grows when a reader of the older form would misread it.
SCHEMA_VERSION = 1
#: What a reason begins with where a suspect is one although no step that was not finished has it.
UNANSWERED = "it had not been answered"
#: The reason of one where several steps were not finished and it is not known at which of them the rank failed.
IN_SEVERAL = "it was in one of several steps that were not finished"
#: The reason of one that was finished, as all steps were.
IN_LAST = "it was in the last step, and no step was unfinished"
