//! Claims and declines that come before their export: who waits, for how long, and what becomes of it.

mod common;

use common::{CACHE, PRINT, Pair, S, TO_INITIATOR, TO_OWNER, identity, issuer, outcome, promise, promised, quiesced};
use pdkv_core::ErrorKind;
use pdkv_core::id::{CacheId, PeerKey, TransferId};
use pdkv_core::node::{Action, Destination, ExportState, NodeConfig, Outcome, TransferSpec};
use pdkv_core::reference::Reference;
use pdkv_core::wire::{ClaimStatus, Message, Status};

fn make(pair: &mut Pair, reference: &Reference) -> (Vec<Action>, Vec<Action>) {
    pair.owner
        .export_issued(pair.now, promised(reference), reference)
        .expect("as promised");
    pair.exchange()
}

fn claim(pair: &mut Pair, reference: &Reference) -> (TransferId, Vec<Action>) {
    let transfer = pair.begin(reference, 0, 4, (0, 2));
    (transfer, pair.exchange().0)
}

fn moves(actions: &[Action], of: TransferId) -> bool {
    actions
        .iter()
        .any(|action| matches!(action, Action::Move { transfer, .. } if *transfer == of))
}

fn failure(actions: &[Action], of: TransferId) -> ErrorKind {
    let Some(Outcome::Failed { error, destination }) = outcome(actions, of) else {
        panic!("not refused: {actions:?}");
    };
    assert_eq!(*destination, Destination::Untouched);
    assert!(quiesced(actions, of));
    error.kind()
}

#[test]
fn a_claim_waits_for_its_export_and_its_time_is_counted_once() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let (transfer, actions) = claim(&mut pair, &reference);
    assert!(actions.is_empty(), "{actions:?}");
    assert_eq!((pair.owner.parked_claims(), pair.owner.live_claims()), (1, 0));
    pair.pass(S * 4);
    let (actions, _) = make(&mut pair, &reference);
    assert!(moves(&actions, transfer));
    assert_eq!((pair.owner.parked_claims(), pair.owner.live_claims()), (0, 1));
    // Ten seconds from the claim on, at both ends: not six, and not fourteen.
    let (actions, _) = pair.pass(S * 5);
    assert!(outcome(&actions, transfer).is_none());
    // The owner takes the claim back by itself, even from an initiator that says nothing.
    pair.now += S;
    pair.owner.tick(pair.now);
    assert_eq!((pair.owner.live_claims(), pair.owner.stats().claims_revoked), (0, 1));
    pair.initiator.tick(pair.now);
    let (actions, _) = pair.exchange();
    assert!(
        matches!(outcome(&actions, transfer), Some(Outcome::Failed { error, .. })
        if error.kind() == ErrorKind::TransferTimeout)
    );
}

#[test]
fn a_transfer_under_an_issued_reference_ends_as_any_other() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let (transfer, _) = claim(&mut pair, &reference);
    make(&mut pair, &reference);
    pair.initiator.moved(pair.now, transfer, Ok(1));
    let (actions, of_owner) = pair.exchange();
    assert!(matches!(outcome(&actions, transfer), Some(Outcome::Done { .. })));
    assert!(matches!(
        of_owner.last(),
        Some(Action::ExportChanged {
            state: ExportState::Done,
            ..
        })
    ));
    // And it is buried: a second claim is told so, and does not wait.
    let (late, actions) = claim(&mut pair, &reference);
    assert_eq!(failure(&actions, late), ErrorKind::ReferenceUsed);
}

#[test]
fn patience_ends() {
    // Nor does anybody wait longer than a claim may last.
    for (early_claim, max_claim) in [(S * 3, S * 300), (S * 300, S * 3)] {
        let mut pair = Pair::with(NodeConfig {
            early_claim,
            max_claim,
            ..NodeConfig::default()
        });
        let issuer = issuer(&mut pair);
        let reference = promise(&issuer, 1, 1);
        let (transfer, _) = claim(&mut pair, &reference);
        let (actions, _) = pair.pass(S * 2);
        assert!(outcome(&actions, transfer).is_none());
        let (actions, _) = pair.pass(S * 2);
        assert_eq!(failure(&actions, transfer), ErrorKind::ReferenceUnknown);
        // The slot is free again, and the export may still be made.
        let (again, _) = claim(&mut pair, &reference);
        let (actions, _) = make(&mut pair, &reference);
        assert!(moves(&actions, again));
    }
}

#[test]
fn without_an_issuer_nobody_waits() {
    let mut pair = Pair::new();
    let mut elsewhere = Pair::new();
    let reference = promise(&issuer(&mut elsewhere), 1, 1);
    let (transfer, actions) = claim(&mut pair, &reference);
    assert_eq!(failure(&actions, transfer), ErrorKind::ReferenceUnknown);
    // The key is the same, so it is genuine; once an issuer is taken, it is a promise.
    issuer(&mut pair);
    claim(&mut pair, &reference);
    assert_eq!(pair.owner.parked_claims(), 1);
    // Of another cache nobody has taken one.
    let other = elsewhere.owner.issuer(CacheId(6), PRINT);
    let (transfer, actions) = claim(&mut pair, &promise(&other, 2, 1));
    assert_eq!(failure(&actions, transfer), ErrorKind::ReferenceUnknown);
}

#[test]
fn nothing_forged_is_ever_parked() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let mut forged = promise(&issuer, 1, 1);
    forged.num_blocks += 1;
    let (transfer, actions) = claim(&mut pair, &forged);
    assert_eq!(failure(&actions, transfer), ErrorKind::ReferenceForged);
    let mut old = promise(&issuer, 1, 1);
    old.incarnation = identity("prefill", 9).incarnation;
    let old = old.sealed(&identity("prefill", 2).mac_key);
    // The initiator itself would refuse; another one might not.
    let message = Message::Reject(Box::new(pdkv_core::wire::Reject {
        reference: old,
        consumer: 1,
    }));
    pair.owner.handle(pair.now, TO_INITIATOR, message).expect("honest");
    assert_eq!((pair.owner.parked_claims(), pair.owner.stats().stray_messages), (0, 1));
    let mut stray = promise(&issuer, 3, 1);
    stray.tag[0] ^= 1;
    pair.initiator.reject(TO_OWNER, stray, 1).expect("up");
    pair.exchange();
    assert_eq!(pair.owner.stats().stray_messages, 2);
    let reference = promise(&issuer, 3, 1);
    make(&mut pair, &reference);
    assert_eq!(pair.owner.export_state(reference.export_id), ExportState::Active);
}

#[test]
fn what_no_export_could_grant_is_refused_at_once() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let good = Pair::spec(&reference, 0, 4, (0, 2));
    let cases: [(TransferSpec, ErrorKind); 3] = [
        (
            TransferSpec {
                expected_digest: Some(b"other".to_vec()),
                ..good.clone()
            },
            ErrorKind::ReferenceDigest,
        ),
        (
            TransferSpec {
                expected_fingerprint: [8; 32],
                ..good.clone()
            },
            ErrorKind::ReferenceFingerprint,
        ),
        (
            TransferSpec {
                first_block: 1,
                ..good.clone()
            },
            ErrorKind::Layout,
        ),
    ];
    for (spec, kind) in cases {
        let transfer = pair.initiator.begin(pair.now, TO_OWNER, spec).expect("begins");
        let (actions, _) = pair.exchange();
        assert_eq!(failure(&actions, transfer), kind);
    }
    // The layers are known when the export is made.
    let spec = Pair::spec(&reference, 0, 4, (1, 2));
    let transfer = pair.initiator.begin(pair.now, TO_OWNER, spec).expect("begins");
    assert!(pair.exchange().0.is_empty());
    let (actions, _) = make(&mut pair, &reference);
    assert_eq!(failure(&actions, transfer), ErrorKind::Layout);
}

#[test]
fn parked_claims_take_the_slots_and_give_them_back() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 2);
    let (first, _) = claim(&mut pair, &reference);
    let (second, _) = claim(&mut pair, &reference);
    let (third, actions) = claim(&mut pair, &reference);
    assert_eq!(failure(&actions, third), ErrorKind::ReferenceUsed);
    // A cancel reaches the owner, which forgets the claim.
    pair.initiator.cancel(pair.now, first);
    let (actions, _) = pair.exchange();
    assert!(matches!(outcome(&actions, first), Some(Outcome::Cancelled { .. })));
    assert_eq!(
        (pair.owner.parked_claims(), pair.owner.stats().claims_abandoned),
        (1, 1)
    );
    let (fourth, _) = claim(&mut pair, &reference);
    let (actions, _) = make(&mut pair, &reference);
    assert!(moves(&actions, second) && moves(&actions, fourth) && !moves(&actions, first));
}

#[test]
fn the_initiators_deadline_ends_a_parked_transfer() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let spec = TransferSpec {
        timeout: S,
        ..Pair::spec(&reference, 0, 4, (0, 2))
    };
    let transfer = pair.initiator.begin(pair.now, TO_OWNER, spec).expect("begins");
    let (actions, _) = pair.pass(S);
    let kind = failure(&actions, transfer);
    assert!(
        [ErrorKind::TransferTimeout, ErrorKind::ReferenceUnknown].contains(&kind),
        "{kind:?}"
    );
    assert_eq!(pair.owner.parked_claims(), 0);
}

#[test]
fn a_lost_peer_leaves_nothing_parked() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    claim(&mut pair, &reference);
    let lost = pdkv_core::Error::new(ErrorKind::PeerLost, "test", "cut");
    pair.owner.peer_down(pair.now, TO_INITIATOR, &lost);
    assert_eq!(pair.owner.parked_claims(), 0);
    assert_eq!(pair.owner.next_deadline(), None, "a timer is left");
    pair.owner
        .export_issued(pair.now, promised(&reference), &reference)
        .expect("as promised");
    assert!(pair.owner.poll_action().is_none(), "nobody is answered");
}

#[test]
fn asked_about_a_parked_claim_the_owner_says_that_it_is_alive() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let (transfer, _) = claim(&mut pair, &reference);
    let ask = |pair: &mut Pair| {
        let message = Message::Status(Status { transfer });
        pair.owner.handle(pair.now, TO_INITIATOR, message).expect("honest");
        match pair.owner.poll_action() {
            Some(Action::Send {
                message: Message::StatusReply(reply),
                ..
            }) => reply.status,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ask(&mut pair), ClaimStatus::Active);
    pair.pass(S * 11);
    assert!(matches!(ask(&mut pair), ClaimStatus::Failed(_)));
}

#[test]
fn a_claim_that_comes_twice_is_parked_once() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 2);
    pair.begin(&reference, 0, 4, (0, 2));
    let Some(Action::Send { message, .. }) = pair.initiator.poll_action() else {
        panic!("no claim");
    };
    for _ in 0..2 {
        pair.owner
            .handle(pair.now, TO_INITIATOR, message.clone())
            .expect("honest");
    }
    assert_eq!(
        (pair.owner.parked_claims(), pair.owner.stats().duplicate_claims),
        (1, 1)
    );
}

#[test]
fn the_parking_place_is_bounded_for_each_peer_and_for_all() {
    let config = NodeConfig {
        max_early_claims_per_peer: 2,
        max_early_claims: 3,
        ..NodeConfig::default()
    };
    let mut pair = Pair::with(config);
    let issuer = issuer(&mut pair);
    let mut last = Vec::new();
    for id in 1..=3 {
        let (transfer, actions) = claim(&mut pair, &promise(&issuer, id, 1));
        last.push((transfer, actions));
    }
    let (transfer, actions) = last.pop().expect("three");
    assert_eq!(failure(&actions, transfer), ErrorKind::Capacity);
    assert_eq!(pair.owner.parked_claims(), 2);
    // Another peer finds the rest of the room, which is one.
    let other = PeerKey(77);
    let remote = common::remote(&pair.initiator);
    pair.owner
        .peer_up(pair.now, other, pdkv_core::node::Role::Owner, remote);
    for (number, id) in (1..=2).zip(10..) {
        let reference = promise(&issuer, id, 1);
        pair.initiator
            .begin(pair.now, TO_OWNER, Pair::spec(&reference, 0, 4, (0, 2)))
            .expect("begins");
        let Some(Action::Send { message, .. }) = pair.initiator.poll_action() else {
            panic!("no claim");
        };
        pair.owner.handle(pair.now, other, message).expect("honest");
        assert_eq!(pair.owner.parked_claims(), 3, "after `{number}`");
    }
    // Room comes back when the export is made.
    let first = promise(&issuer, 1, 1);
    make(&mut pair, &first);
    assert_eq!(pair.owner.parked_claims(), 2);
    claim(&mut pair, &promise(&issuer, 20, 1));
    assert_eq!(pair.owner.parked_claims(), 3);
}

#[test]
fn an_early_decline_ends_the_export_when_it_is_made() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    for _ in 0..2 {
        pair.initiator.reject(TO_OWNER, reference.clone(), 7).expect("up");
    }
    pair.exchange();
    let (transfer, actions) = claim(&mut pair, &reference);
    assert_eq!(failure(&actions, transfer), ErrorKind::ReferenceUsed);
    let (_, of_owner) = make(&mut pair, &reference);
    assert!(matches!(
        of_owner[..],
        [Action::ExportChanged {
            state: ExportState::Declined,
            ..
        }]
    ));
    assert_eq!((pair.owner.live_exports(), pair.owner.stats().rejects), (0, 1));
    let lost = pdkv_core::Error::new(ErrorKind::PeerLost, "test", "cut");
    pair.owner.peer_down(pair.now, TO_INITIATOR, &lost);
    assert_eq!(pair.owner.next_deadline(), None, "a timer is left");
}

#[test]
fn one_of_two_declines_early_and_the_other_has_it() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 2);
    pair.initiator.reject(TO_OWNER, reference.clone(), 1).expect("up");
    let (transfer, _) = claim(&mut pair, &reference);
    let (actions, _) = make(&mut pair, &reference);
    assert!(moves(&actions, transfer));
    pair.initiator.moved(pair.now, transfer, Ok(1));
    pair.exchange();
    assert_eq!(pair.owner.export_state(reference.export_id), ExportState::Done);
}

#[test]
fn an_early_decline_is_forgotten_after_a_lease() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    pair.initiator.reject(TO_OWNER, reference.clone(), 7).expect("up");
    pair.pass(S * 31);
    make(&mut pair, &reference);
    assert_eq!(pair.owner.export_state(reference.export_id), ExportState::Active);

    // So too while a claim of another consumer waits.
    let reference = promise(&issuer, 2, 2);
    pair.initiator.reject(TO_OWNER, reference.clone(), 7).expect("up");
    pair.pass(S * 25);
    let (transfer, _) = claim(&mut pair, &reference);
    pair.pass(S * 6);
    let (actions, _) = make(&mut pair, &reference);
    assert!(moves(&actions, transfer));
    assert_eq!(pair.owner.stats().rejects, 0);
    let (second, actions) = claim(&mut pair, &reference);
    assert!(moves(&actions, second), "its slot is free again");
}

#[test]
fn early_declines_are_bounded() {
    let config = NodeConfig {
        max_early_claims: 3,
        ..NodeConfig::default()
    };
    let mut pair = Pair::with(config);
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1000);
    for consumer in 0..10 {
        pair.initiator
            .reject(TO_OWNER, reference.clone(), consumer)
            .expect("up");
    }
    pair.exchange();
    assert_eq!(pair.owner.stats().stray_messages, 7);
    make(&mut pair, &reference);
    assert_eq!(pair.owner.stats().rejects, 3);
}

#[test]
fn a_lease_that_is_not_there_yet_is_not_renewed() {
    let mut pair = Pair::new();
    let issuer = issuer(&mut pair);
    let reference = promise(&issuer, 1, 1);
    let request = pair
        .initiator
        .renew_remote(pair.now, TO_OWNER, reference, S)
        .expect("up");
    let (actions, _) = pair.exchange();
    assert!(
        matches!(&actions[..], [Action::Renewed { request: r, result: Err(error), .. }]
            if *r == request && error.kind() == ErrorKind::ReferenceUnknown),
        "{actions:?}"
    );
}

#[test]
fn a_cache_that_goes_away_lets_nobody_wait() {
    for close in [false, true] {
        let mut pair = Pair::new();
        let issuer = issuer(&mut pair);
        let (transfer, _) = claim(&mut pair, &promise(&issuer, 1, 1));
        if close {
            pair.owner.release_all(pair.now);
        } else {
            pair.owner.withdraw_cache(pair.now, CACHE);
        }
        let (actions, _) = pair.exchange();
        assert_eq!(failure(&actions, transfer), ErrorKind::ReferenceUnknown);
        let (late, actions) = claim(&mut pair, &promise(&issuer, 2, 1));
        assert_eq!(failure(&actions, late), ErrorKind::ReferenceUnknown);
    }
}
