"""How obstore reaches an object server on this machine: URLs, options, environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from obstore.store import ObjectStore, from_url

from tests.support.objects.object_map import BUCKET

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

Dialect = Literal["s3", "gcs", "azure"]

_SCHEMES: dict[Dialect, str] = {"s3": "s3", "gcs": "gs", "azure": "az"}


@dataclasses.dataclass(frozen=True)
class Access:
    """A server's address, and the keys that it takes.

    Attributes:
        dialect: the protocol that it speaks.
        endpoint: its base URL; for Azure with the account as its path.
        access_key: user name, or account of Azure.
        secret_key: its password; None: requests are not signed.
    """

    dialect: Dialect
    endpoint: str
    access_key: str = "account"
    secret_key: str | None = None

    def url(self, key: str = "") -> str:
        """Return the URL of a key in the bucket."""
        return f"{_SCHEMES[self.dialect]}://{BUCKET}/{key}"

    def options(self) -> dict[str, str]:
        """Return the options of obstore under their own names, for `S3Store("bucket", **options)` and its like.

        `from_url` takes all but `allow_http`, which it wants in `client_options`; else it panics (obstore 0.12.1).
        """
        if self.dialect == "gcs":
            # Some requests of obstore look for credentials even if they need not be signed: a token ends the search.
            return {"base_url": self.endpoint, "bearer_token": "token", "allow_http": "true"}
        # Stated in both cases, because the environment may name a server that takes unsigned requests.
        signing = {"skip_signature": "true" if self.secret_key is None else "false"}
        if self.dialect == "azure":
            keys = {"account_name": self.access_key, "account_key": self.secret_key or _ANY_ACCOUNT_KEY}
            return {"endpoint": self.endpoint, "allow_http": "true", **keys, **signing}
        keys = {"access_key_id": self.access_key, "secret_access_key": self.secret_key or "secret"}
        return {"endpoint": self.endpoint, "allow_http": "true", "region": "us-east-1", **keys, **signing}

    def environment(self) -> dict[str, str]:
        """Return the variables by which obstore reaches the server without any options.

        A store made with `client_options` ignores the variable that allows HTTP; time limits can be options instead.
        """
        special = {
            ("s3", "endpoint"): "AWS_ENDPOINT_URL",
            ("azure", "account_name"): "AZURE_STORAGE_ACCOUNT_NAME",
            ("azure", "account_key"): "AZURE_STORAGE_ACCOUNT_KEY",
        }
        vendor = {"s3": "AWS", "gcs": "GOOGLE", "azure": "AZURE"}[self.dialect]
        return {
            special.get((self.dialect, name), f"{vendor}_{name.upper()}"): value
            for name, value in self.options().items()
        }

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Let the environment name the server, for this process and those that it starts."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment().items():
                patch.setenv(name, value)
            yield

    def store(
        self,
        key: str = "",
        *,
        client_options: ClientConfig | None = None,
        retry_config: RetryConfig | None = None,
    ) -> ObjectStore:
        """Return a store whose paths start below a key."""
        options: dict[str, Any] = self.options()
        client: ClientConfig = {"allow_http": bool(options.pop("allow_http")), **(client_options or {})}
        return from_url(self.url(key), client_options=client, retry_config=retry_config or {}, **options)

    def through(self, proxy_endpoint: str) -> Access:
        """Return the way to the same server through a proxy."""
        path = urllib.parse.urlsplit(self.endpoint).path
        return dataclasses.replace(self, endpoint=proxy_endpoint + path)


class Reachable:
    """A server whose `access` says how it is reached."""

    access: Access

    @property
    def endpoint(self) -> str:
        """The URL of the server; on Azure, that of the account."""
        return self.access.endpoint

    def url(self, key: str = "") -> str:
        """Return the URL of a key in the bucket."""
        return self.access.url(key)

    def options(self) -> dict[str, str]:
        """Return the options of obstore under their own names; see `Access.options`."""
        return self.access.options()

    def environment(self) -> dict[str, str]:
        """Return the variables by which obstore reaches the server without any options."""
        return self.access.environment()

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Let the environment name the server; see `Access.named`."""
        return self.access.named()


_ANY_ACCOUNT_KEY = "c2VjcmV0"
