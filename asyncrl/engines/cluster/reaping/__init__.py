"""The reaper: a process that ends what a killed driver leaves behind."""
