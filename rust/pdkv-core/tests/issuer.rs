//! Issuers and the exports that they promise: what is refused, by which error, and that bytes are only bytes.

mod common;

use common::{CACHE, PRINT, Pair, identity, issuer, promise, promised};
use pdkv_core::ErrorKind;
use pdkv_core::block_table::BlockTable;
use pdkv_core::id::{CacheId, ExportId};
use pdkv_core::issuer::Issuer;
use pdkv_core::node::{ExportSpec, Node, NodeConfig};
use pdkv_core::reference::{ExportKind, Reference};

type Spoil = fn(&mut ExportSpec);

#[test]
fn an_export_that_is_not_the_promised_one_names_both_values() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let cases: [(Spoil, ErrorKind, &str); 8] = [
        (|s| s.id = ExportId::new([2; 16]), ErrorKind::Config, "id `0101"),
        (
            |s| s.kind = ExportKind::Offer,
            ErrorKind::Config,
            "kind `export`, exported is `offer`",
        ),
        (
            |s| s.cache = CacheId(6),
            ErrorKind::Config,
            "cache `5`, exported is `6`",
        ),
        (
            |s| s.fingerprint[0] ^= 1,
            ErrorKind::ReferenceFingerprint,
            "`0707070707070707`, exported is `0607070707070707`",
        ),
        (
            |s| s.digest = b"x".to_vec(),
            ErrorKind::ReferenceDigest,
            "`70726f6d7074`, exported is `78`",
        ),
        (
            |s| s.blocks = BlockTable::from_ids(&[1]),
            ErrorKind::Layout,
            "blocks `4`, exported is `1`",
        ),
        (
            |s| s.num_tokens = 63,
            ErrorKind::Config,
            "tokens `64`, exported is `63`",
        ),
        (|s| s.consumers = 2, ErrorKind::Config, "consumers `1`, exported is `2`"),
    ];
    pair.begin(&reference, 0, 4, (0, 2));
    pair.exchange();
    for (spoil, kind, text) in cases {
        let mut wrong = promised(&reference);
        spoil(&mut wrong);
        let error = pair
            .owner
            .export_issued(pair.now, wrong, &reference)
            .expect_err("not as promised");
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text), "{error}");
    }
    // Nothing was made of it, and who waits still does.
    assert_eq!((pair.owner.live_exports(), pair.owner.parked_claims()), (0, 1));
    pair.owner
        .export_issued(pair.now, promised(&reference), &reference)
        .expect("as promised");
    assert_eq!((pair.owner.live_exports(), pair.owner.parked_claims()), (1, 0));
}

#[test]
fn a_reference_is_for_one_export_of_one_life() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let mut refuse = |reference: &Reference, kind: ErrorKind| {
        let error = pair
            .owner
            .export_issued(pair.now, promised(reference), reference)
            .expect_err("refused");
        assert_eq!((error.kind(), error.operation()), (kind, "export"), "{error}");
    };
    let mut forged = reference.clone();
    forged.tag[3] ^= 1;
    refuse(&forged, ErrorKind::ReferenceForged);
    let mut other_life = common::Pair::new();
    other_life.owner = Node::new(NodeConfig::default(), identity("prefill", 3));
    refuse(
        &promise(&other_life.owner.issuer(CACHE, PRINT), 1, 1),
        ErrorKind::ReferenceRestarted,
    );
    pair.owner
        .export_issued(pair.now, promised(&reference), &reference)
        .expect("as promised");
    for state in ["active", "released"] {
        let error = pair
            .owner
            .export_issued(pair.now, promised(&reference), &reference)
            .expect_err("once");
        assert_eq!(error.kind(), ErrorKind::ReferenceUsed);
        assert!(error.message().contains(&format!("`{state}`")), "{error}");
        pair.owner.release(pair.now, reference.export_id).expect("it is known");
    }
}

#[test]
fn an_issuer_travels_as_bytes_and_shows_no_key() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let bytes = issuer.to_bytes();
    let again = Issuer::from_bytes(&bytes).expect("our own bytes");
    assert_eq!(again, issuer);
    let id = ExportId::new([1; 16]);
    assert_eq!(
        again.issue(4, 64, b"prompt", 1, id).expect("issued"),
        issuer.issue(4, 64, b"prompt", 1, id).expect("issued")
    );
    let key = pdkv_core::hex::encode(&identity("prefill", 2).mac_key);
    let shown = format!("{issuer:?}");
    assert!(
        shown.contains("prefill") && !shown.contains(&key) && !shown.contains("87, 87"),
        "{shown}"
    );
    for error in [
        issuer.issue(4, 64, b"", 0, id).expect_err("nobody"),
        issuer.issue(4, 64, &[0; 65], 1, id).expect_err("long"),
    ] {
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

#[test]
fn bytes_that_are_no_issuer_are_refused_without_being_shown() {
    let mut pair = Pair::new();
    let bytes = issuer(&mut pair).to_bytes();
    for len in 0..bytes.len() {
        let error = Issuer::from_bytes(&bytes[..len]).expect_err("cut short");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(
        Issuer::from_bytes(&longer).expect_err("longer").kind(),
        ErrorKind::Config
    );
    let mut later = bytes.clone();
    later[11] = 2;
    let error = Issuer::from_bytes(&later).expect_err("later format");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("`2`"), "{error}");
    let name = bytes.len() - "prefill:1".len() - 2 - "prefill".len();
    let mut no_text = bytes.clone();
    no_text[name] = 0xff;
    assert_eq!(
        Issuer::from_bytes(&no_text).expect_err("no text").kind(),
        ErrorKind::Config
    );
    let mut long = bytes;
    long[name - 1] = 0xff;
    assert_eq!(
        Issuer::from_bytes(&long).expect_err("a long name").kind(),
        ErrorKind::Config
    );
}
