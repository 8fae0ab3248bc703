"""`forebay bundle`: evidence in one file, proven and signed."""

from __future__ import annotations

from pathlib import Path

import click

from forebay.bench.bundle import (
    BundleUnsound,
    Verification,
    generate_key,
    read_private_key,
    read_public_key,
    sign_bundle,
    verify_bundle,
)
from forebay.bench.bundle.keys import public_path_of
from forebay.bench.units import bytes_text
from forebay.cli.output import foreign, one_line, print_json

_PATH = click.Path(path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")


@click.group()
def bundle() -> None:
    """Prove and sign the evidence of a benchmark or of the gates: a zip file with the sums of all that is in it."""


@bundle.command()
@click.argument("path", metavar="BUNDLE", type=_PATH)
@click.option("--key", type=_PATH, help="A .pub file: its owner must be among those who signed.")
@_JSON
def verify(path: Path, key: Path | None, as_json: bool) -> int:
    """Whether BUNDLE is, to the last byte, what was written, and who signed it.

    Without --key it is enough that its signatures are good, whosoever they are; then compare the key yourself.

    Exit code: 0; 1 if it does not verify; 2 for a file or key that cannot be read.
    """
    trusted_key = read_public_key(key) if key is not None else None
    try:
        verified = verify_bundle(path, trusted_key)
    except BundleUnsound as error:
        return _say_unsound(path, error, as_json)
    if as_json:
        print_json({"verified": True, **_plain(verified)})
        return 0
    files = verified.manifest.files
    click.echo(
        f"verified: {foreign(verified.manifest.title)}, of {foreign(verified.manifest.created)}, {len(files)} files, "
        f"{bytes_text(sum(each.content_bytes for each in files))}"
    )
    click.echo(f"  manifest   SHA-256 {verified.manifest_sha256}")
    for signer in verified.signed_by:
        known = (
            "the key that was asked for" if trusted_key is not None and signer == trusted_key.hex() else "not checked"
        )
        click.echo(f"  signed by  {signer} ({known})")
    if not verified.signed_by:
        click.echo("  signed by  nobody: it is undamaged, but anybody could have written it")
    return 0


@bundle.command()
@click.argument("path", metavar="BUNDLE", type=_PATH)
@click.option("--key", type=_PATH, required=True, help="The private key, of `forebay bundle keygen`.")
@_JSON
def sign(path: Path, key: Path, as_json: bool) -> int:
    """Verify BUNDLE and add a signature to it. Both sides of a sale may sign.

    Exit code: 0; 1 if it does not verify; 2 for a file or key that cannot be used.
    """
    signing_key = read_private_key(key)
    try:
        verified = sign_bundle(path, signing_key)
    except BundleUnsound as error:
        return _say_unsound(path, error, as_json)
    if as_json:
        print_json({"verified": True, **_plain(verified)})
    else:
        click.echo(f"signed by {signing_key.public_bytes.hex()}")
    return 0


@bundle.command()
@click.argument("path", metavar="KEY", type=_PATH)
@_JSON
def keygen(path: Path, as_json: bool) -> int:
    """Make a key pair: KEY for you alone, and KEY.pub for everybody who is to check what you sign."""
    public = generate_key(path).hex()
    if as_json:
        print_json({"private_key": path, "public_key": public_path_of(path), "key": public})
    else:
        click.echo(foreign(f"wrote {path} (keep it) and {public_path_of(path)} (give it away)"))
        click.echo(f"key {public}")
    return 0


def _say_unsound(path: Path, error: BundleUnsound, as_json: bool) -> int:
    if as_json:
        print_json({"verified": False, "reason": one_line(str(error))})
    else:
        click.echo(f"does not verify: {foreign(str(path))}: {one_line(str(error))}")
    return 1


def _plain(verified: Verification) -> dict[str, object]:
    return {
        "manifest_sha256": verified.manifest_sha256,
        "signed_by": verified.signed_by,
        "manifest": verified.manifest,
    }
