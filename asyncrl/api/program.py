"""The program of a run that ``asyncrl.Run`` starts: ``python -m asyncrl.api.program DESCRIPTOR [--any-flag ...]``."""

import sys

if __name__ == "__main__":  # the reward's worker processes import this file again, and nothing of asyncrl with it
    import socket

    from asyncrl.api.reports import Reports
    from asyncrl.app.ending.leaving import leave
    from asyncrl.app.entry import main

    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a process that outlives the run must not keep the socket open
    reports = Reports(connection)
    code = main(sys.argv[2:], listener=reports)
    reports.finish()
    leave(code)
