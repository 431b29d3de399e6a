"""Errors that may be told to the other end in full: they are made of settings and names, never of data."""


class ToldError(Exception):
    """An error of a silo whose text may leave it.

    Of any other exception only the name of its class leaves; the text may hold data and stays in the silo's own log.

    Args:
        told: one sentence for the server, made of nothing that depends on the silo's data.
        stays: what the silo's owner should know besides, for the silo's own log.

    >>> error = ToldError("its data have changed since the study began", stays="csv of 12 March, 803 rows")
    >>> str(error)
    'its data have changed since the study began'
    """

    def __init__(self, told: str, stays: str = "") -> None:
        super().__init__(told)
        self.told = told
        self.stays = stays


class Malformed(ToldError, ValueError):
    """Bytes that are no message of this protocol."""


class NotForThisSilo(ToldError):
    """A message to another silo, of another sender than the server, or a reply where a request was expected."""


class WrongStudy(ToldError):
    """The two ends have different study files."""


class OtherSoftware(ToldError):
    """The two ends have different versions or precisions, so that their numbers need not agree."""


class PolicyRefused(ToldError):
    """The silo's owner does not allow it."""


class NotWritten(ToldError):
    """The silo could not note what it was about to send, so it did not send it."""


# What went wrong with the two installations, not with the silo's own work: somebody must change something.
MISMATCHES = (Malformed.__name__, NotForThisSilo.__name__, WrongStudy.__name__, OtherSoftware.__name__)
