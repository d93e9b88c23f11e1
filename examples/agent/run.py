"""The command of ``--agent-command``: runs the agent on the task of one episode, and writes its reward.

asyncrl names a file with the task (``ASYNCRL_EPISODE``) and one for the reward (``ASYNCRL_RESULT``).  The address and
the key of the model are in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, where the client of ``openai`` looks for them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

AGENT = Path(__file__).with_name("agent.py")


def main() -> int:
    task = json.loads(Path(os.environ["ASYNCRL_EPISODE"]).read_text())
    question = task["metadata"]["question"]
    ran = subprocess.run([sys.executable, str(AGENT), question], stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode == 0:
        reward = float(ran.stdout.strip() == task["label"])
        Path(os.environ["ASYNCRL_RESULT"]).write_text(json.dumps({"reward": reward}))
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
