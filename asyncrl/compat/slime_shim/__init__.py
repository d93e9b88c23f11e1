"""The folder of the package ``slime`` that user files import; ``compat/episodes/shim`` puts it in front of others."""
