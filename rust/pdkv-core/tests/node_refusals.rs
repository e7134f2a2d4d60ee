//! Each way a reference can be bad has its own error, and leaves the destination untouched.

mod common;

use common::{Pair, S, TO_INITIATOR, TO_OWNER, identity, outcome, quiesced, remote};
use pdkv_core::node::{Action, Destination, Node, NodeConfig, Outcome, Role, TransferSpec};
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::wire::Message;
use pdkv_core::{Error, ErrorKind};

/// Claims and expects the refusal.
fn refused(pair: &mut Pair, spec: TransferSpec, kind: ErrorKind) {
    let transfer = pair.initiator.begin(pair.now, TO_OWNER, spec).expect("begins");
    let (actions, _) = pair.exchange();
    let Some(Outcome::Failed { error, destination }) = outcome(&actions, transfer) else {
        panic!("`{}` was not refused: {actions:?}", kind.slug());
    };
    assert_eq!((error.kind(), *destination), (kind, Destination::Untouched), "{error}");
    assert!(quiesced(&actions, transfer));
}

fn whole(reference: &Reference) -> TransferSpec {
    Pair::spec(reference, 0, reference.num_blocks, (0, 2))
}

fn pull(pair: &mut Pair, reference: &Reference) {
    let transfer = pair.begin(reference, 0, reference.num_blocks, (0, 2));
    pair.exchange();
    pair.initiator.moved(pair.now, transfer, Ok(1));
    let (actions, _) = pair.exchange();
    assert!(matches!(outcome(&actions, transfer), Some(Outcome::Done { .. })));
}

#[test]
fn used_released_expired_and_unknown() {
    let mut pair = Pair::new();
    let used = pair.export(ExportKind::Export, 4, 2, 2);
    pull(&mut pair, &used);
    pull(&mut pair, &used);
    refused(&mut pair, whole(&used), ErrorKind::ReferenceUsed);

    let released = pair.export(ExportKind::Export, 4, 2, 1);
    pair.owner.release(pair.now, released.export_id).expect("alive");
    pair.owner
        .release(pair.now, released.export_id)
        .expect("releasing twice is nothing");
    refused(&mut pair, whole(&released), ErrorKind::ReferenceReleased);

    let expired = pair.export(ExportKind::Export, 4, 2, 1);
    pair.pass(S * 31);
    refused(&mut pair, whole(&expired), ErrorKind::ReferenceExpired);
    assert_eq!(pair.owner.stats().expired_unclaimed, 1);

    let mut unknown = used.clone();
    unknown.export_id = pdkv_core::id::ExportId::new([99; 16]);
    let unknown = unknown.sealed(&identity("prefill", 2).mac_key);
    refused(&mut pair, whole(&unknown), ErrorKind::ReferenceUnknown);
}

#[test]
fn digest_fingerprint_and_range() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 1);
    let good = whole(&reference);
    let spec = TransferSpec {
        expected_digest: Some(b"other prompt".to_vec()),
        ..good.clone()
    };
    refused(&mut pair, spec, ErrorKind::ReferenceDigest);
    refused(
        &mut pair,
        TransferSpec {
            expected_fingerprint: [8; 32],
            ..good.clone()
        },
        ErrorKind::ReferenceFingerprint,
    );
    refused(
        &mut pair,
        TransferSpec {
            first_block: 1,
            ..good.clone()
        },
        ErrorKind::Layout,
    );
    refused(&mut pair, Pair::spec(&reference, 0, 4, (1, 2)), ErrorKind::Layout);
    // Bad claims took no slot.
    pull(&mut pair, &reference);
}

type Alter = fn(&mut Reference);

#[test]
fn every_altered_field_is_seen() {
    let mut pair = Pair::new();
    let good = pair.export(ExportKind::Export, 4, 2, 1);
    let alterations: [(&str, Alter); 11] = [
        ("kind", |r| r.kind = ExportKind::Offer),
        ("engine", |r| r.engine.push('x')),
        ("address", |r| r.address.push('x')),
        ("export_id", |r| {
            r.export_id = pdkv_core::id::ExportId::new([3; 16]);
        }),
        ("cache", |r| r.cache.0 ^= 1),
        ("digest", |r| r.digest[0] ^= 1),
        ("fingerprint", |r| r.fingerprint[0] ^= 1),
        ("num_tokens", |r| r.num_tokens ^= 1),
        ("num_blocks", |r| r.num_blocks ^= 1),
        ("consumers", |r| r.consumers += 1),
        ("tag", |r| r.tag[15] ^= 1),
    ];
    for (field, alter) in alterations {
        let mut forged = good.clone();
        alter(&mut forged);
        assert_ne!(forged, good, "{field}");
        refused(&mut pair, whole(&forged), ErrorKind::ReferenceForged);
    }
    pull(&mut pair, &good);
}

#[test]
fn a_restarted_owner_is_another_one() {
    let mut pair = Pair::new();
    let old = pair.export(ExportKind::Export, 4, 2, 1);
    // The owner itself refuses, even when the initiator does not look.
    pair.owner = Node::new(NodeConfig::default(), identity("prefill", 3));
    let initiator = remote(&pair.initiator);
    pair.owner.peer_up(pair.now, TO_INITIATOR, Role::Owner, initiator);
    refused(&mut pair, whole(&old), ErrorKind::ReferenceRestarted);
    // And an initiator that has shaken hands with the new life does not even ask.
    let mut fresh = Node::new(NodeConfig::default(), identity("decode", 9));
    fresh.peer_up(pair.now, TO_OWNER, Role::Initiator, remote(&pair.owner));
    let error = fresh.begin(pair.now, TO_OWNER, whole(&old)).expect_err("another life");
    assert_eq!(error.kind(), ErrorKind::ReferenceRestarted);
}

#[test]
fn limits_are_capacity_errors_and_leave_nothing_behind() {
    let config = NodeConfig {
        max_transfers_per_peer: 1,
        max_exports: 1,
        ..NodeConfig::default()
    };
    let mut pair = Pair::with(config);
    let reference = pair.export(ExportKind::Export, 4, 2, 2);
    pair.begin(&reference, 0, 4, (0, 2));
    let error = pair
        .initiator
        .begin(pair.now, TO_OWNER, whole(&reference))
        .expect_err("one at a time");
    assert_eq!(error.kind(), ErrorKind::Capacity);
    let spec = pdkv_core::node::ExportSpec {
        id: pdkv_core::id::ExportId::new([77; 16]),
        kind: ExportKind::Export,
        cache: pdkv_core::id::CacheId(5),
        blocks: pdkv_core::block_table::BlockTable::from_ids(&[1]),
        num_layers: 1,
        num_tokens: 16,
        digest: Vec::new(),
        fingerprint: common::PRINT,
        consumers: 1,
        lease: S,
    };
    let error = pair.owner.export(pair.now, spec).expect_err("one export");
    assert_eq!(error.kind(), ErrorKind::Capacity);
    assert_eq!(pair.owner.live_exports(), 1);
}

#[test]
fn a_consumer_that_declines_frees_its_slot_once() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 2);
    for _ in 0..3 {
        pair.initiator.reject(TO_OWNER, reference.clone(), 7).expect("up");
        pair.exchange();
    }
    assert_eq!(pair.owner.stats().rejects, 1);
    pair.initiator.reject(TO_OWNER, reference.clone(), 8).expect("up");
    pair.exchange();
    assert_eq!(pair.owner.live_exports(), 0);
    refused(&mut pair, whole(&reference), ErrorKind::ReferenceUsed);
}

/// What only whoever owns the memory can know.
fn moved_away() -> Error {
    Error::new(ErrorKind::Region, "use GPU memory", "there is other memory now")
}

#[test]
fn a_claim_that_its_user_refuses_is_refused_once_and_costs_no_slot() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 1);
    let transfer = pair.begin(&reference, 0, 4, (0, 2));
    let Some(Action::Send {
        message: Message::Claim(claim),
        ..
    }) = pair.initiator.poll_action()
    else {
        panic!("no claim")
    };
    for _ in 0..2 {
        let claim = Clone::clone(&*claim);
        pair.owner
            .refuse_claim(pair.now, TO_INITIATOR, claim, &moved_away())
            .expect("honest");
    }
    let (actions, _) = pair.exchange();
    let Some(Outcome::Failed { error, destination }) = outcome(&actions, transfer) else {
        panic!("not refused: {actions:?}")
    };
    assert_eq!(
        (error.kind(), *destination),
        (ErrorKind::Region, Destination::Untouched)
    );
    let stats = pair.owner.stats();
    assert_eq!((stats.claims_refused, stats.duplicate_claims), (1, 1));
    pull(&mut pair, &reference);
    // Only an initiator claims.
    let error = pair
        .initiator
        .refuse_claim(pair.now, TO_OWNER, *claim, &moved_away())
        .expect_err("claims are made of owners");
    assert_eq!(error.kind(), ErrorKind::Handshake);
}

#[test]
fn a_claim_that_is_spoilt_fails_at_its_fence() {
    for kind in [ExportKind::Export, ExportKind::Offer] {
        let mut pair = Pair::new();
        let reference = pair.export(kind, 4, 2, 1);
        let transfer = pair.begin(&reference, 0, 4, (0, 2));
        pair.exchange();
        pair.owner.spoil(TO_INITIATOR, transfer, &moved_away());
        let (actions, _) = pair.exchange();
        assert!(outcome(&actions, transfer).is_none(), "told before it asks");
        pair.initiator.moved(pair.now, transfer, Ok(1));
        let (actions, _) = pair.exchange();
        let Some(Outcome::Failed { error, destination }) = outcome(&actions, transfer) else {
            panic!("the fence let it pass: {actions:?}")
        };
        assert_eq!((error.kind(), *destination), (ErrorKind::Region, Destination::Invalid));
        assert!(quiesced(&actions, transfer));
        assert_eq!(pair.owner.live_claims(), 0);
        assert_eq!(pair.owner.stats().fences_refused, 1);
        // What is not there is not spoilt.
        pair.owner.spoil(TO_INITIATOR, transfer, &moved_away());
    }
}

#[test]
fn a_claim_that_is_taken_back_ends_at_once() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 1);
    let transfer = pair.begin(&reference, 0, 4, (0, 2));
    pair.exchange();
    pair.owner.take_back(pair.now, TO_INITIATOR, transfer, &moved_away());
    let (actions, _) = pair.exchange();
    let Some(Outcome::Failed { error, .. }) = outcome(&actions, transfer) else {
        panic!("not told: {actions:?}")
    };
    assert_eq!(error.kind(), ErrorKind::Region);
    pair.owner.take_back(pair.now, TO_INITIATOR, transfer, &moved_away());
    assert_eq!(pair.owner.stats().claims_revoked, 1);
}

#[test]
fn who_asks_for_too_long_a_lease_here_is_refused_and_a_peer_is_told_what_it_got() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 1);
    let most = S * 3600;
    let refusal = pair.owner.renew(pair.now, reference.export_id, most + S);
    assert_eq!(refusal.expect_err("too long").kind(), ErrorKind::Config);
    let request = pair
        .initiator
        .renew_remote(pair.now, TO_OWNER, reference.clone(), most * 2)
        .expect("up");
    let (actions, _) = pair.exchange();
    let answer = actions.iter().find_map(|a| match a {
        Action::Renewed { request: r, result, .. } if *r == request => result.as_ref().ok(),
        _ => None,
    });
    assert_eq!(answer, Some(&most));
    pair.owner.release(pair.now, reference.export_id).expect("alive");
    let refusal = pair.owner.renew(pair.now, reference.export_id, S).expect_err("ended");
    assert_eq!(
        (refusal.kind(), refusal.operation()),
        (ErrorKind::ReferenceReleased, "renew")
    );
}
