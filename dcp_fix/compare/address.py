"""The address of an endpoint: what is one, how it is shown, whether two are one server, and what lies on the way to it.

A password in an address, or in that of a proxy, is never shown.
"""

import ipaddress
import os
import re
import ssl
import urllib.request

import httpx

from dcp_fix.base.errors import UserError, shown

LABEL = re.compile(r"[^\s.@/\\%]{1,63}")  # % is what became of a blank
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def base_url(name: str, url: str) -> httpx.URL:
    """The address that ends in /v1. Raises UserError for what is no http address."""
    seen = without_password(url)
    try:
        parsed = httpx.URL(url)
        host, _ = parsed.raw_host.decode("ascii"), parsed.host  # which decodes an international name, or refuses
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        why = shown(error, 80) if seen == shown(url) else "not an address"
        raise UserError(f"endpoint {name}: {seen!r} is no address ({why}); say http://host:port") from None
    if parsed.scheme not in ("http", "https") or not host:
        raise UserError(f"endpoint {name}: {seen!r} is no http address; say http://host:port")
    if ":" not in host and (len(host) > 253 or not all(map(LABEL.fullmatch, host.rstrip(".").split(".")))):
        raise UserError(f"endpoint {name}: {shown(host, 80)!r} is no name of a host; say http://host:port")
    return parsed.copy_with(path=parsed.path.rstrip("/").removesuffix("/v1") + "/v1", query=None, fragment=None)


def without_password(url: str) -> str:
    """An address as typed, for a message: without user and password, wherever they stand, and printable."""
    return shown(re.sub(r"^([a-zA-Z][\w+.-]*://)?.*@", r"\1", url, flags=re.DOTALL))


def is_loopback(url: httpx.URL) -> bool:
    """Whether the address is this machine's own, where no proxy leads."""
    if url.host == "localhost" or url.host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        return False


def same_server(a: httpx.URL, b: httpx.URL) -> bool:
    """Whether both lead to one server: the same host, or both this machine, with the same port and path."""

    def place(url):
        host = "this machine" if is_loopback(url) else url.host.rstrip(".").lower()
        return host, url.port or {"http": 80, "https": 443}[url.scheme], url.path

    return place(a) == place(b)


def proxy_of(url: httpx.URL) -> str | None:
    """What the requests go through, as the end of a sentence; None without a proxy."""
    if is_loopback(url) or urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    for scheme in (url.scheme, "all"):
        if proxies.get(scheme):
            return f"through the proxy {scheme.upper()}_PROXY={without_password(proxies[scheme])}"
    return None


def tls_of(url: httpx.URL) -> ssl.SSLContext | bool:
    """What https is checked against; False for http. Raises UserError that names the setting at fault."""
    if url.scheme == "http":
        return False
    for variable in CERTIFICATES:
        if (path := os.environ.get(variable)) and not os.path.exists(path):
            raise UserError(f"{variable}={shown(path)}: there is no such file; unset it, or name the certificates")
    try:
        return httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"the certificates cannot be read ({error}); see {' and '.join(CERTIFICATES)}") from error


def client_of(name: str, url: httpx.URL, tls, timeout: httpx.Timeout) -> httpx.AsyncClient:
    """A client for one request. Raises UserError that names the proxy settings which it cannot use."""
    limits = httpx.Limits(max_keepalive_connections=0)  # an idle one may be closed just as it is used again
    try:
        return httpx.AsyncClient(timeout=timeout, limits=limits, verify=tls, trust_env=not is_loopback(url))
    except (httpx.InvalidURL, ValueError, OSError, ImportError) as error:
        variables = [v for v in os.environ if v.upper() in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")]
        given = ", ".join(f"{v}={without_password(os.environ[v])}" for v in sorted(variables))
        why = shown(" ".join(str(error).split()), 120)
        raise UserError(f"endpoint {name}: the proxy settings cannot be used ({given}): {why}") from None
