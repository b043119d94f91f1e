"""The kit's data about processes, stacks and incidents, without judgement.

This module holds only constants, so that a command that prints an incident need not load the whole model.
"""

#: Version of ``incident.json``; it grows when a reader of the older form would misread it.
SCHEMA_VERSION = 1
#: Start of the reason for a suspect that is in no unfinished step.
UNANSWERED = "it had not been answered"
#: Reason for a suspect where several steps were unfinished and it is not known in which of them the rank failed.
IN_SEVERAL = "it was in one of several steps that were not finished"
#: Reason for a suspect in the last step, where all steps were finished.
IN_LAST = "it was in the last step, and no step was unfinished"
#: Reasons for a suspect that was the only request. With an earlier suspicion of it, any of them is a proof.
ALONE = "it was the only request of the step that was not finished"
ALONE_AT = "it was the only request of the step in which the rank failed"
ONLY = f"{UNANSWERED}, was in no step yet, and no other one was under way"
#: Note on a suspect whose client had disconnected or whose abort was requested; it counts neither for nor against.
ABORTED = "it had been aborted before"
