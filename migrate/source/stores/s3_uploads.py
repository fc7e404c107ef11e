"""Writing to S3 through boto3. Each file is one multipart upload, of which nothing shows before it
is completed; a part is uploaded, or copied by the store from another object.

Every object that appears says in its metadata which run made it, and is made on the condition that
there is none. Some stores ignore that condition, so each name is asked for before.
"""

from __future__ import annotations

import base64
import hashlib
import io
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from typing import Any, Final, Literal, NamedTuple, NoReturn

from ...core.errors import MigrateError, fail, option, printable
from ..urls import split_url
from .checksums import joined_parts, kept_in
from .s3 import asking, client_for

# of S3: bytes of a part but for the last, bytes of any part, and parts of an upload
LEAST, LARGEST, MOST_PARTS = 5 << 20, 5 << 30, 10_000
KEPT: Final = "what was uploaded is kept"
GONE: Final = (
    "another run has finished the output with it, or `migrate clean` or a rule of the bucket has "
    "thrown it away"
)
PARTIAL, JOURNAL, WORDS = ".migrate-partial", "journal.json", "parts/"
# longer ones were not written by a run
_LONGEST_JOURNAL: Final = 64 << 20
_RUN: Final = "migrate-run"
# bytes of a part that are sent at once
_SENT: Final = 1 << 20
_RIGHTS: Final = (
    "writing needs s3:ListBucket and s3:ListBucketMultipartUploads on the bucket, s3:PutObject, "
    "s3:GetObject, s3:AbortMultipartUpload, s3:ListMultipartUploadParts and s3:DeleteObject "
    "(of the journal) on its objects"
)
_GONE: Final = ("NoSuchUpload",)
_ABSENT: Final = ("404", "NoSuchKey", "NotFound")
_TAKEN: Final = ("412", "PreconditionFailed")
# what a store answers that copies no ranges, or not for this user
_NO_COPY: Final = ("403", "AccessDenied", "501", "NotImplemented", "MethodNotAllowed", "405")
# hosts of stores whose parts have to be alike, and why
EQUAL_PARTS: Final = {
    "storage.googleapis.com": "Google's S3 interface copies no ranges",
    "r2.cloudflarestorage.com": "R2 wants parts of equal size",
}


class CopyRefusedError(Exception):
    """The store does not copy ranges for this user; its code for that."""


class ListedPart(NamedTuple):
    """A part as the store lists it, with what names it when an upload is completed."""

    size: int
    named: Mapping[str, str]

    @property
    def tag(self) -> str:
        """The ETag, which the store has answered with when the part was made."""
        return _bare(self.named)


class StoredWords:
    """Small objects below a prefix, by name. Methods raise M968 where the store refuses and M969
    where it fails.
    """

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix
        self.shown = f"s3://{bucket}/{prefix}"

    def below(self, name: str) -> StoredWords:
        """Those below another prefix in this one."""
        return StoredWords(self._client, self._bucket, f"{self._prefix}{name}/")

    def names(self) -> list[str]:
        found = []
        pages = self._client.get_paginator("list_objects_v2")
        with asking(self.shown, _RIGHTS):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                found += [one["Key"][len(self._prefix) :] for one in page.get("Contents", ())]
        return found

    def say(self, name: str, content: bytes, new: bool = False) -> bool:
        """Leaves a word of this name in place of an earlier one; with `new` only where there is
        none, and answers whether it did.
        """
        from botocore.exceptions import ClientError

        asked = {"IfNoneMatch": "*"} if new else {}
        with asking(self.shown + name, _RIGHTS):
            try:
                self._client.put_object(
                    Bucket=self._bucket,
                    Key=self._prefix + name,
                    Body=content,
                    **asked,
                    **_md5(content),
                )
            except ClientError as error:
                if new and error.response["Error"]["Code"] in _TAKEN:
                    return False
                raise
        return True

    def said(self, name: str) -> bytes:
        """A word that was left; nothing if there is none."""
        from botocore.exceptions import ClientError

        with asking(self.shown + name, _RIGHTS):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except ClientError as error:
                if error.response["Error"]["Code"] in _ABSENT:
                    return b""
                raise
            with answer["Body"] as body:
                return bytes(body.read())

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with asking(self.shown + name, _RIGHTS):
                self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)


class PartStream(io.RawIOBase):
    """The bytes of a part as a stream: boto3 copies anything else before it signs and sends it."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data, self._at = memoryview(data), 0

    def __len__(self) -> int:
        return self._data.nbytes

    def readable(self) -> bool:
        return True

    seekable = readable

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        found = self._data[self._at : self._at + view.nbytes]
        view[: found.nbytes] = found
        self._at += found.nbytes
        return found.nbytes

    def read(self, size: int | None = -1) -> Any:
        """More than is asked for: http.client asks for 16 KiB, and asking takes longer than sending
        them.
        """
        most = len(self) if size is None or size < 0 else max(size, _SENT)
        found = self._data[self._at : self._at + most]
        self._at += found.nbytes
        return found

    def close(self) -> None:
        super().close()
        self._data.release()


class S3Output:
    """Where an output goes: objects below a prefix, or, where `single`, one object.

    `location` is how messages call it, without a slash at its end. Methods may be called by several
    threads. All raise M968 where the store refuses and M969 where it fails.
    """

    # tells outputs in stores apart before anything of them is imported
    kind: Literal["s3"] = "s3"

    def __init__(self, text: str) -> None:
        url = self._url = split_url(text)
        self._client, self._bucket, key = client_for(url)
        self._unsigned: Any = None
        self._making = threading.Lock()
        self.key = key.rstrip("/")
        self.location = f"s3://{self._bucket}/{self.key}"
        self.single = False
        if not self.key:
            fail(
                "M115",
                f"{printable(self.location, 240)}: names a whole bucket",
                help="give a prefix in it: s3://BUCKET/PREFIX",
            )
        self.endpoint: str = self._client.meta.endpoint_url
        # which checksum the parts of all uploads carry, once the first was begun
        self.checksum: str | None = None
        # which they had better carry, if it is one of those that they can
        self.preferred: str | None = None
        # uploads that were begun with a checksum that the store does not take: to be aborted
        self.refused: list[tuple[str, str]] = []
        # keys whose upload boto3 asked for again: the store may have begun it twice
        self.asked_again: set[str] = set()

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def bucket(self) -> str:
        return self._bucket

    def key_of(self, name: str) -> str:
        """The key of a file of the output."""
        return self.key if self.single else f"{self.key}/{name}"

    def shown(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    @property
    def journal(self) -> str:
        """The key of the journal, which lies beside the output."""
        return f"{self.key}{PARTIAL}/{JOURNAL}"

    def equal_parts(self) -> str | None:
        """Why parts have to be uploaded, and of equal size; None where they need not."""
        return next((why for host, why in EQUAL_PARTS.items() if host in self.endpoint), None)

    def region(self, bucket: str | None = None) -> str | None:
        """The region of a bucket; None if that is not told."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            found = self._client.head_bucket(Bucket=bucket or self._bucket)
        except (ClientError, BotoCoreError):
            return None
        return found.get("BucketRegion") or None

    def objects(self, most: int = 2) -> list[str]:
        """The first keys of what is there: the name itself as an object, and what lies below."""
        with asking(self.location, _RIGHTS):
            page = self._client.list_objects_v2(
                Bucket=self._bucket, Prefix=f"{self.key}/", MaxKeys=most
            )
        found = [one["Key"] for one in page.get("Contents", ())]
        return [self.key, *found] if self.head(self.key) is not None else found

    def head(self, key: str) -> tuple[int, str | None, str] | None:
        """Size of an object, the run that made it, and its ETag; None without."""
        from botocore.exceptions import ClientError

        with asking(self.shown(key), _RIGHTS):
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if error.response["Error"]["Code"] in _ABSENT:
                    return None
                raise
        return head["ContentLength"], head.get("Metadata", {}).get(_RUN), head["ETag"]

    def begin(self, key: str, run: str) -> str:
        """Begins an upload, and finds out by the first one which checksum the store takes."""
        known = _checksums(self.preferred) if self.checksum is None else (self.checksum,)
        for checksum in known:
            made = self._begun(key, run, checksum)
            if made is None:
                continue
            taken = made.get("ChecksumAlgorithm"), made.get("ChecksumType", "FULL_OBJECT")
            if made.get("ResponseMetadata", {}).get("RetryAttempts"):
                self.asked_again.add(key)
            if checksum in ("MD5", self.checksum) or taken == (checksum, "FULL_OBJECT"):
                self.checksum = checksum
                return str(made["UploadId"])
            self.refused.append((key, str(made["UploadId"])))
        raise AssertionError("MD5 needs nothing of the store")

    def _begun(self, key: str, run: str, checksum: str) -> Any:
        from botocore.exceptions import ClientError

        asked = {}
        if checksum != "MD5":
            asked = {"ChecksumAlgorithm": checksum, "ChecksumType": "FULL_OBJECT"}
        with asking(self.shown(key), _RIGHTS):
            try:
                return self._client.create_multipart_upload(
                    Bucket=self._bucket, Key=key, Metadata={_RUN: run}, **asked
                )
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if asked and code in ("InvalidRequest", "InvalidArgument", "NotImplemented", "501"):
                    return None
                raise

    def put_part(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Uploads a part, with a checksum that the store compares; its ETag. M913 if the upload is
        gone.
        """
        from botocore.exceptions import ClientError

        with asking(self.shown(key), _RIGHTS), PartStream(data) as body:
            try:
                made = self._uploading().upload_part(
                    Bucket=self._bucket,
                    Key=key,
                    UploadId=upload,
                    PartNumber=number,
                    Body=body,
                    **self._summed(data),
                )
            except ClientError as error:
                if error.response["Error"]["Code"] in _GONE:
                    self._refuse_gone(key)
                raise
        return _bare(made)

    def _uploading(self) -> Any:
        """What parts are sent through. A part whose MD5 stands in the signed header needs no
        SHA-256, which boto3 computes of what goes through no TLS, unless its settings ask for it.
        """
        signs = (self._client.meta.config.s3 or {}).get("payload_signing_enabled")
        if self.checksum != "MD5" or signs:
            return self._client
        with self._making:
            if self._unsigned is None:
                self._unsigned, *_ = client_for(self._url, payload_signing_enabled=False)
            return self._unsigned

    def _summed(self, data: bytes | bytearray) -> dict[str, str]:
        if self.checksum in (None, "MD5"):
            return _md5(data)
        # boto3 computes it
        return {"ChecksumAlgorithm": str(self.checksum)}

    def copy_part(
        self, key: str, upload: str, number: int, of: tuple[str, str, str], start: int, stop: int
    ) -> str:
        """Has the store copy a range of another object: bucket, key and version; the ETag of the
        part. CopyRefusedError if it does not; FileNotFoundError if the object is another one by
        now; M913 if the upload is gone.
        """
        from botocore.exceptions import ClientError

        bucket, name, version = of
        with asking(self.shown(key), _RIGHTS):
            try:
                made = self._client.upload_part_copy(
                    Bucket=self._bucket,
                    Key=key,
                    UploadId=upload,
                    PartNumber=number,
                    CopySource={"Bucket": bucket, "Key": name},
                    CopySourceIfMatch=version,
                    CopySourceRange=f"bytes={start}-{stop - 1}",
                )
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code in _GONE:
                    self._refuse_gone(key)
                if code in (*_TAKEN, *_ABSENT, "416", "InvalidRange"):
                    raise FileNotFoundError(name) from error
                if code in _NO_COPY:
                    raise CopyRefusedError(code) from error
                raise
        return _bare(made.get("CopyPartResult", {}))

    def kept_checksum(self, of: tuple[str, str, str], size: int) -> tuple[str, int] | None:
        """The checksum that the store keeps of all bytes of an object, and its name: bucket, key
        and version are those of a source. None where it keeps none or does not tell.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, key, version = of
        asked = {"Bucket": bucket, "Key": key}
        with suppress(ClientError, BotoCoreError):
            head = self._client.head_object(**asked, IfMatch=version, ChecksumMode="ENABLED")
            if (found := kept_in(head)) is not None:
                return found
            if head.get("ChecksumType") == "COMPOSITE":
                joined = joined_parts(self._described_parts(asked, version.strip('"')))
                return joined[:2] if joined is not None and joined[2] == size else None
        return None

    def _described_parts(self, asked: Mapping[str, str], version: str) -> Iterator[Any]:
        """What the store tells of the parts that an object was uploaded in."""
        after = 0
        while True:
            found = self._client.get_object_attributes(
                **asked, ObjectAttributes=["ETag", "ObjectParts"], PartNumberMarker=after
            )
            parts = found.get("ObjectParts", {})
            if found.get("ETag") != version:
                return
            yield from parts.get("Parts", ())
            if not parts.get("IsTruncated"):
                return
            after = parts["NextPartNumberMarker"]

    def parts(self, key: str, upload: str) -> dict[int, ListedPart] | None:
        """What the store has of an upload, by number; None if there is no such upload."""
        from botocore.exceptions import ClientError

        found = {}
        with asking(self.shown(key), _RIGHTS):
            try:
                pages = self._client.get_paginator("list_parts")
                for page in pages.paginate(Bucket=self._bucket, Key=key, UploadId=upload):
                    for one in page.get("Parts", ()):
                        named = {
                            word: value
                            for word, value in one.items()
                            if word == "ETag" or word.startswith("Checksum")
                        }
                        found[one["PartNumber"]] = ListedPart(one["Size"], named)
            except ClientError as error:
                if error.response["Error"]["Code"] in _GONE:
                    return None
                raise
        return found

    def complete(self, key: str, upload: str, parts: Mapping[int, ListedPart], run: str) -> None:
        """Lets a file appear. M904 if something is there that this run did not make."""
        from botocore.exceptions import ClientError

        if self._stands(key, run):
            return
        listed = [{"PartNumber": number, **parts[number].named} for number in sorted(parts)]
        with asking(self.shown(key), _RIGHTS):
            try:
                self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=key,
                    UploadId=upload,
                    MultipartUpload={"Parts": listed},
                    IfNoneMatch="*",
                )
            except ClientError as error:
                # the answer to a first request may have been lost
                code = error.response["Error"]["Code"]
                if code not in (*_TAKEN, *_GONE) or not self._stands(key, run):
                    if code in _GONE:
                        self._refuse_gone(key)
                    raise

    def put(self, key: str, content: bytes, run: str) -> None:
        """Makes a small file. M904 if something is there that this run did not make."""
        from botocore.exceptions import ClientError

        if self._stands(key, run):
            return
        with asking(self.shown(key), _RIGHTS):
            try:
                self._client.put_object(
                    Bucket=self._bucket,
                    Key=key,
                    Body=content,
                    Metadata={_RUN: run},
                    IfNoneMatch="*",
                    **_md5(content),
                )
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code not in _TAKEN or not self._stands(key, run):
                    raise

    def _refuse_gone(self, key: str) -> NoReturn:
        """M913 for an upload that the store does not know any more."""
        fail(
            "M913",
            f"{printable(self.shown(key), 300)}: the store no longer knows the upload that was "
            "begun for it",
            notes=(GONE,),
            help=f"look at what is at {printable(self.location, 240)}; if the output is not "
            "there, run it again",
        )

    def _stands(self, key: str, run: str) -> bool:
        """Whether this run has made the object already; M904 if somebody else has."""
        found = self.head(key)
        if found is not None and found[1] != run:
            refuse_appeared(self.shown(key))
        return found is not None

    def uploads(self) -> dict[str, tuple[str, Any]]:
        """Unfinished uploads of the output's files: id -> (key, when it was begun)."""
        found = {}
        pages = self._client.get_paginator("list_multipart_uploads")
        with asking(self.location, _RIGHTS):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self.key):
                for one in page.get("Uploads", ()):
                    if one["Key"] == self.key or one["Key"].startswith(f"{self.key}/"):
                        found[one["UploadId"]] = (one["Key"], one["Initiated"])
        return found

    def abort(self, key: str, upload: str) -> None:
        """Throws an upload away with all its parts, if it is there."""
        from botocore.exceptions import ClientError

        with asking(self.shown(key), _RIGHTS):
            try:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
            except ClientError as error:
                if error.response["Error"]["Code"] not in _GONE:
                    raise

    def read_journal(self) -> tuple[bytes, datetime] | None:
        """The journal that a run has left, and when it was written; None without."""
        from botocore.exceptions import ClientError

        with asking(self.shown(self.journal), _RIGHTS):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self.journal)
            except ClientError as error:
                if error.response["Error"]["Code"] in _ABSENT:
                    return None
                raise
            with answer["Body"] as body:
                return bytes(body.read(_LONGEST_JOURNAL)), answer["LastModified"]

    def write_journal(self, content: bytes, new: bool) -> bool:
        """Writes the journal; with `new` only where there is none, and answers whether it did."""
        from botocore.exceptions import ClientError

        asked = {"IfNoneMatch": "*"} if new else {}
        with asking(self.shown(self.journal), _RIGHTS):
            try:
                self._client.put_object(
                    Bucket=self._bucket, Key=self.journal, Body=content, **asked, **_md5(content)
                )
            except ClientError as error:
                if error.response["Error"]["Code"] not in _TAKEN:
                    raise
                # the answer to a first request may have been lost
                there = self.read_journal()
                return there is not None and there[0] == content
        return True

    def words(self, below: str = WORDS) -> StoredWords:
        """What processes of a run leave beside the journal, below a name there."""
        return StoredWords(self._client, self._bucket, f"{self.key}{PARTIAL}/{below}")

    def remove_journal(self, words: Iterable[str] = ()) -> bool:
        """Removes these words and then the journal; whether that could be done."""
        from botocore.exceptions import BotoCoreError, ClientError

        with suppress(ClientError, BotoCoreError, MigrateError):
            self.words().remove(words)
            self._client.delete_object(Bucket=self._bucket, Key=self.journal)
            return True
        return False

    def remove(self, key: str, run: str) -> bool:
        """Removes an object that this run has made; whether none of it is there afterwards."""
        from botocore.exceptions import BotoCoreError, ClientError

        with suppress(ClientError, BotoCoreError, MigrateError):
            found = self.head(key)
            if found is not None and found[1] == run:
                self._client.delete_object(Bucket=self._bucket, Key=key)
            return True
        return False

    def stretches(self, key: str, start: int, stop: int, step: int) -> Iterator[bytes]:
        """The bytes of an object, so many at a time."""
        for at in range(start, stop, step):
            last = min(stop, at + step) - 1
            with asking(self.shown(key), _RIGHTS):
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=key, Range=f"bytes={at}-{last}"
                )
                with answer["Body"] as body:
                    yield body.read()


def _bare(named: Mapping[str, str]) -> str:
    """The ETag of an answer, which some stores quote in one and not in another."""
    return named.get("ETag", "").strip('"')


def _md5(data: bytes | bytearray) -> dict[str, str]:
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return {"ContentMD5": base64.b64encode(digest).decode()}


def _checksums(preferred: str | None) -> tuple[str, ...]:
    """What parts may carry, the best first. boto3 computes CRC32 always, others by awscrt alone."""
    known = ("CRC64NVME", "CRC32C") if find_spec("awscrt") is not None else ("CRC32",)
    first = (preferred,) if preferred is not None and preferred in (*known, "CRC32") else ()
    return (*first, *(name for name in known if name != preferred), "MD5")


def refuse_appeared(shown: str) -> NoReturn:
    """M904 for an object that appeared where the run was about to make one."""
    fail(
        "M904",
        f"{printable(shown, 300)} appeared during this run",
        notes=(KEPT,),
        help=f"move it away and run it again with {option('resume', True)}",
    )
