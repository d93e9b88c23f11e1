"""The language of a text, by langdetect, which the published IFEval uses."""

from asyncrl.errors import RewardFailed


def is_in_language(text: str, language: str) -> bool:
    """Return whether a text is in a language, given by its ISO 639-1 code; a text without letters is in any.

    Raises RewardFailed if langdetect is not installed.
    """
    try:
        import langdetect  # an optional extra
    except ModuleNotFoundError:
        raise RewardFailed("instructions on languages and capitals need langdetect: install asyncrl[ifeval]") from None
    langdetect.DetectorFactory.seed = 0  # its sampling is random otherwise
    try:
        found: str = langdetect.detect(text)
    except langdetect.LangDetectException:
        return True
    return found == language
