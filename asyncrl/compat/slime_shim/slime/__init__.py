"""The part of slime's package that user files import.

``docs/guides/slime_files.md`` lists the symbols.  Modules import each other relatively, because they are found as
``slime.*`` there.
"""
