"""S3, and what speaks its protocol, through boto3. Credentials, region, endpoint and retries are
those of boto3's own configuration: environment, `~/.aws`, roles.

Every read says `If-Match` with the ETag of the listing, so that an object that is replaced
meanwhile is refused by the store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from http.client import HTTPException
from typing import Any, Final, NoReturn

from ...core.errors import fail, printable
from ..urls import Url
from .objects import Located, RemoteObject, refuse_range, refuse_without
from .requests import FLIGHT

# no objects of these classes can be read before they are restored
ARCHIVED: Final = ("GLACIER", "DEEP_ARCHIVE")
# names of buckets, aliases and ARNs of access points; no `@`, so no secret in front of one
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_/-]{1,250}")
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")
_ABSENT: Final = ("404", "NoSuchKey", "NotFound")
_CREDENTIALS: Final = (
    "AuthorizationHeaderMalformed", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId",
    "InvalidToken", "RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired",
)  # fmt: skip
# settings that are numbers: boto3 does not say which one it cannot read
_NUMBERS: Final = (
    "AWS_MAX_ATTEMPTS", "AWS_METADATA_SERVICE_NUM_ATTEMPTS", "AWS_METADATA_SERVICE_TIMEOUT",
)  # fmt: skip
_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# what a proxy or a page for logging in answers in place of a store
_PAGE: Final = re.compile(rb"\s*<(!doctype html|html|head|body)\b", re.IGNORECASE)
_TO_READ: Final = "reading needs s3:ListBucket on the bucket and s3:GetObject on its objects"
_LOG_IN: Final = (
    "boto3 looks in the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID and others), in ~/.aws, and "
    "for the role of the machine; `aws sts get-caller-identity` shows what it finds"
)


def locate(url: Url) -> Located:
    """What the URL names: an object, or a prefix. M915 where it is both, M917 without a bucket."""
    shown = url.shown
    client, bucket, key = client_for(url)
    store = S3Prefix(client, bucket, key if key.endswith("/") or not key else key + "/")
    if not key or key.endswith("/"):
        return Located(store)
    above, _, name = key.rpartition("/")
    parent = S3Prefix(client, bucket, above + "/" if above else "")
    found = parent.find(name)
    if found is None or (not found.size and not store.is_empty()):
        return Located(store)
    if not store.is_empty():
        fail(
            "M915",
            f"{printable(shown, 240)}: is an object, and there are objects below it",
            help=f"give {printable(store.location, 240)} if you mean those",
        )
    return Located(parent, found)


def client_for(url: Url, **settings: Any) -> tuple[Any, str, str]:
    """boto3's client with these settings for S3, and the bucket and key that the URL names. M917
    without a bucket, M967.
    """
    shown = url.shown
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        refuse_without("boto3", "s3", shown)
    bucket, _, key = url.rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        fail("M917", f"{printable(shown, 240)}: names no bucket", help="s3://BUCKET/PREFIX/")
    config = Config(
        max_pool_connections=FLIGHT,
        # of a range there is no checksum to compare
        response_checksum_validation="when_required",
        # what is sent says which checksum it carries
        request_checksum_calculation="when_required",
        user_agent_extra="ckpt-migrate",
        s3=settings or None,
    )
    with asking(shown), _settings(shown):
        client = boto3.client("s3", config=config)
    client.meta.events.register_first("before-parse.s3", _refuse_page)
    return client, bucket, key


@contextmanager
def _settings(shown: str) -> Iterator[None]:
    """Raises what boto3 says of its own configuration as M968."""
    from botocore import exceptions as found

    try:
        yield
    except (found.NoCredentialsError, found.PartialCredentialsError):
        raise
    except found.ProfileNotFound as error:
        what = f"there is no profile {printable(error.kwargs['profile'], 80)}"
        _refuse_setting(shown, what, "AWS_PROFILE, or the file AWS_CONFIG_FILE or ~/.aws/config")
    except found.ConfigParseError as error:
        what = f"{printable(error.kwargs['path'], 240)} cannot be parsed"
        _refuse_setting(
            shown, what, "that file, or AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE"
        )
    except found.InvalidRegionError as error:
        what = f"{printable(repr(error.kwargs['region_name']), 80)} is no region"
        _refuse_setting(shown, what, "AWS_DEFAULT_REGION, or `region` in ~/.aws/config")
    except (found.BotoCoreError, ValueError) as error:
        _refuse_setting(shown, *_wrong_setting(error))


def _wrong_setting(error: Exception) -> tuple[str, str]:
    """What is wrong with a setting of boto3, and where it may stand."""
    from botocore.exceptions import BotoCoreError

    if isinstance(error, BotoCoreError):
        # of the words of a setting and of those that it may have
        return printable(str(error), 300), "the variables of AWS, or ~/.aws/config"
    if str(error).startswith("Invalid endpoint"):
        names = [name for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if name in os.environ]
        what = f"{names[0] if names else 'endpoint_url in ~/.aws/config'} is no URL"
        return what, "it: http://HOST:PORT or https://HOST"
    for name in _NUMBERS:
        if not os.environ.get(name, "0").strip().isdigit():
            return f"{name} is no number", "it, or unset it"
    there = [name for name in os.environ if name.startswith("AWS_") and name not in _KEYS]
    return f"boto3 cannot use one of its settings ({type(error).__name__})", ", ".join(there)


def _refuse_setting(shown: str, what: str, where: str) -> NoReturn:
    fail(
        "M968",
        f"{shown}: {what}",
        help=f"correct {where}" if where else "correct ~/.aws/config",
    )


def _refuse_page(response_dict: Mapping[str, Any], operation_model: Any, **_: Any) -> None:
    """Raises HTTPClientError for a page that came in place of an answer, which would be taken for
    an empty one. What an object holds is not looked at.
    """
    from botocore.exceptions import HTTPClientError

    if response_dict["status_code"] >= 300:
        return
    body = response_dict["body"]
    if operation_model.name in ("GetObject", "HeadObject"):
        is_page = "etag" not in response_dict["headers"]
    else:
        is_page = isinstance(body, bytes) and _PAGE.match(body) is not None
    if is_page:
        if hasattr(body, "close"):
            body.close()
        raise HTTPClientError(error=_PAGE)


class S3Prefix:
    """The objects of a bucket whose keys begin with `prefix`."""

    fixed = False

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix
        self.location = f"s3://{bucket}/{prefix}"

    def copied_from(self, path: str) -> tuple[str, str, str]:
        """What a store that copies has to be told of an object: endpoint, bucket and key."""
        return self._client.meta.endpoint_url, self._bucket, self._prefix + path

    def listing(self) -> Iterator[RemoteObject]:
        pages = self._client.get_paginator("list_objects_v2")
        with asking(self.location):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for one in page.get("Contents", ()):
                    yield RemoteObject(
                        one["Key"][len(self._prefix) :],
                        one["Size"],
                        one["ETag"],
                        _nanoseconds(one["LastModified"]),
                        _archived(one.get("StorageClass")),
                    )

    def is_empty(self) -> bool:
        """Whether nothing lies below the prefix."""
        with asking(self.location):
            page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
        return not page.get("KeyCount", len(page.get("Contents", ())))

    def find(self, path: str) -> RemoteObject | None:
        from botocore.exceptions import ClientError

        with asking(self.location + path):
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=self._prefix + path)
            except ClientError as error:
                # without the right to list, what is not there is forbidden
                if error.response["Error"]["Code"] in (*_ABSENT, "403", "AccessDenied"):
                    return None
                raise
        # what was restored can be read
        restored = 'ongoing-request="false"' in head.get("Restore", "")
        return RemoteObject(
            path,
            head["ContentLength"],
            head["ETag"],
            _nanoseconds(head["LastModified"]),
            "" if restored else _archived(head.get("StorageClass")),
        )

    def fill(self, item: RemoteObject, start: int, buffer: memoryview) -> int:
        from botocore.exceptions import (
            ClientError,
            IncompleteReadError,
            ReadTimeoutError,
            ResponseStreamingError,
        )

        last = start + buffer.nbytes - 1
        with asking(self.location + item.path):
            try:
                answer = self._client.get_object(
                    Bucket=self._bucket,
                    Key=self._prefix + item.path,
                    Range=f"bytes={start}-{last}",
                    IfMatch=item.version,
                )
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code in (*_ABSENT, "412", "PreconditionFailed", "416", "InvalidRange"):
                    raise FileNotFoundError(item.path) from error
                raise
            with answer["Body"] as body:
                span = _RANGE.fullmatch(answer.get("ContentRange", ""))
                whole = (start, buffer.nbytes) == (0, item.size)
                if (span is None and not whole) or (span and int(span[1]) != start):
                    refuse_range(self.location + item.path)
                raw: Any = getattr(body, "_raw_stream", body)
                # urllib3's own readinto reads into memory of its own and copies, which is a third
                # of the processor time of a run; the response below it fills the buffer
                into = getattr(getattr(raw, "_fp", None), "readinto", body.readinto)
                done = 0
                with suppress(
                    IncompleteReadError,
                    ReadTimeoutError,
                    ResponseStreamingError,
                    HTTPException,
                    OSError,
                ):
                    while done < buffer.nbytes and (came := into(buffer[done:])):
                        done += came
                    if done == buffer.nbytes and hasattr(raw, "release_conn"):
                        raw.release_conn()
                return done


def _archived(storage: str | None) -> str:
    return storage if storage in ARCHIVED else ""


def _nanoseconds(moment: datetime) -> int:
    # a float has no room for them
    return int(moment.timestamp()) * 10**9


@contextmanager
def asking(name: str, rights: str = _TO_READ) -> Iterator[None]:
    """Raises what boto3 raises as diagnostics. Its own words are left out: they may hold keys.
    `rights` says what it takes.
    """
    from botocore import exceptions as found
    from botocore.parsers import ResponseParserError

    shown = printable(name, 240)
    try:
        yield
    except found.ClientError as error:
        _refuse(shown, error.response, rights)
    except (
        found.NoCredentialsError,
        found.PartialCredentialsError,
        found.CredentialRetrievalError,
        found.ProfileNotFound,
        found.SSOError,
        found.TokenRetrievalError,
    ) as error:
        fail(
            "M968",
            f"{shown}: boto3 finds no credentials ({type(error).__name__})",
            help=_LOG_IN,
        )
    except found.ParamValidationError:
        fail("M917", f"{shown}: is no name of a bucket or object", help="s3://BUCKET/PREFIX/")
    except ResponseParserError:
        _refuse_other(shown, "the answer is not in the language of S3")
    except (found.BotoCoreError, found.HTTPClientError) as error:
        if error.kwargs.get("error") is _PAGE:
            _refuse_other(shown, "a web page came in place of the store's answer")
        fail(
            "M969",
            f"{shown}: the store does not answer ({type(error).__name__})",
            help="look at the network, AWS_ENDPOINT_URL and HTTPS_PROXY, then run it again",
        )
    except OSError as error:
        if error.filename is None:
            # an object, and no file of this machine
            raise
        where = f"{printable(str(error.filename), 240)} cannot be read"
        _refuse_setting(shown, where, "what names it: a variable of AWS, or ~/.aws/config")
    except ValueError as error:
        _refuse_setting(shown, *_wrong_setting(error))


def _refuse_other(shown: str, what: str) -> NoReturn:
    fail(
        "M969",
        f"{shown}: {what}",
        help="a proxy, a page for logging in or another server answers at that address: look at "
        "AWS_ENDPOINT_URL and HTTPS_PROXY",
    )


def _refuse(shown: str, answer: Any, rights: str) -> NoReturn:
    code = str(answer["Error"].get("Code", ""))
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = printable(code, 60)
    if code == "NoSuchBucket":
        fail("M917", f"{shown}: there is no such bucket", help="`aws s3 ls` lists those of yours")
    if code in ("PermanentRedirect", "301", "IllegalLocationConstraintException") or (
        code in ("AuthorizationHeaderMalformed", "400") and "x-amz-bucket-region" in headers
    ):
        region = headers.get("x-amz-bucket-region")
        where = f"in {printable(region, 40)}" if region else "in another region"
        fail(
            "M968",
            f"{shown}: the bucket is {where} ({said})",
            help=f"set AWS_DEFAULT_REGION{f'={printable(region, 40)}' if region else ''}",
        )
    if code.isdigit() and headers.get("content-type", "").startswith("text/html"):
        # an error of S3 has a name, but for that of a HEAD
        _refuse_other(shown, f"a web page came in place of the store's answer (status {said})")
    if code == "400":
        fail(
            "M968",
            f"{shown}: the store refuses, and does not say why (status 400)",
            help="an expired token and another region (AWS_DEFAULT_REGION) are answered so; "
            + _LOG_IN,
        )
    if code == "InvalidObjectState":
        fail(
            "M968",
            f"{shown}: is archived, and an archived object cannot be read",
            help="restore it first, wait until that is done, then run again",
        )
    if code in _CREDENTIALS:
        fail("M968", f"{shown}: the store does not take the credentials ({said})", help=_LOG_IN)
    if code in ("AccessDenied", "403", "AllAccessDisabled") or status in (401, 403):
        fail(
            "M968",
            f"{shown}: the store refuses ({said})",
            help=rights,
        )
    if code in _ABSENT:
        fail("M917", f"{shown}: there is no such object", help="look at the spelling of the key")
    fail(
        "M969",
        f"{shown}: the store fails ({said or status})",
        help="run it again; boto3 has tried as often as AWS_MAX_ATTEMPTS says",
    )
