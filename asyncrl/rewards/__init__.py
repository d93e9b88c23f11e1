"""The rewards of answers: built-in graders, user functions, and a remote service.

``app/rewards`` builds a reward from the configuration; ``workers`` runs graders in processes of the run.
"""
