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
#: Where nothing else was under way one of these, and a suspicion before, proves a request.
ALONE = "it was the only request of the step that was not finished"
ALONE_AT = "it was the only request of the step in which the rank failed"
ONLY = f"{UNANSWERED}, was in no step yet, and no other one was under way"
#: Said of one whose client had gone, or of which somebody asked for the end; it speaks neither for nor against it.
ABORTED = "it had been aborted before"
