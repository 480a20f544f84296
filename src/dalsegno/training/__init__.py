"""The training engine: steps, what happens between them, saves and resumes, of the Trainer and of Run alike.

In reading order: no module imports from a line above its own.

::

    preloaded                               for processes that ranks are forked from
    trainer · run                           what the user builds
    loop                                    the training loop
    lifecycle · last_leg · run_dir          a run over its legs: lock, restore, start, finish
    session · leg_recorder                  one leg: epochs, steps, begin and end
    resume · chosen_start · resume_options  the checkpoint that a leg begins with
    step_boundary                           between two steps: log, evaluate, save, stop
    recorder · evaluation_runner · save_coordinator · control_sync
    checkpointer · contents · settings      saves and loads, what they contain, what is compared
    step · evaluation · forward · placement
    parts · callback_set                    what all of these share
    schedule · hyperparameters · metrics · result · snapshot · signals · time_limit · requeue
"""
