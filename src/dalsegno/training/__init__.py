"""The training engine: steps, what happens between them, saves and resumes, of the Trainer and of Run alike.

In reading order: no module imports from a line above its own.

::

    preloaded                               for processes that ranks are forked from
    trainer · run · loop_checks             what the user builds
    loop                                    the training loop
    lifecycle                               a run over its legs: lock, restore, start, finish
    session                                 one leg: epochs, steps, begin and end
    step_boundary                           between two steps: log, evaluate, save, stop
    action_schedule                         when each of these is due
    commands · rollback · step_log · save_coordinator · control_sync
    checkpoint_sources                      where a run's checkpoints are: in memory, on disk, at its URL
    checkpoint_contents                     what a checkpoint contains, and what a resume compares
    leg_recorder · chosen_start             files that say how legs began and ended, and where the next one begins
    evaluation · prepared_model · train_step
    run_parts                               what all of these share
    module_flags · mean_loss · rollback_effects · learning_rate · optimizers · muon · stop_requests · full_disk · result
    variables
"""
