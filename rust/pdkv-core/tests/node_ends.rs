//! Every transfer ends, on both sides, whoever gives up first; and memory is quiesced only when the
//! mover is out of it.

mod common;

use std::time::Duration;

use common::{Pair, S, TO_INITIATOR, TO_OWNER, outcome, quiesced};
use pdkv_core::id::{PeerKey, TransferId};
use pdkv_core::node::{Action, Destination, ExportState, NodeConfig, Outcome, Role, TransferState};
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::wire::{Ack, Fault, Message, Revoke};
use pdkv_core::{Error, ErrorKind};

fn moving(pair: &mut Pair, kind: ExportKind) -> (Reference, TransferId) {
    let reference = pair.export(kind, 4, 2, 1);
    let transfer = pair.begin(&reference, 0, 4, (0, 2));
    pair.exchange();
    assert_eq!(pair.initiator.transfer_state(transfer), Some(TransferState::Moving));
    (reference, transfer)
}

fn stopped() -> Result<u64, Error> {
    Err(Error::new(ErrorKind::TransferCancelled, "mover", "stopped"))
}

fn failure(actions: &[Action], transfer: TransferId) -> (ErrorKind, Destination) {
    match outcome(actions, transfer) {
        Some(Outcome::Failed { error, destination }) => (error.kind(), *destination),
        other => panic!("not a failure: {other:?}"),
    }
}

#[test]
fn cancel_finishes_at_once_and_quiesces_when_the_mover_is_out() {
    let mut pair = Pair::new();
    let (reference, transfer) = moving(&mut pair, ExportKind::Export);
    pair.initiator.cancel(pair.now, transfer);
    pair.initiator.cancel(pair.now, transfer);
    let (actions, _) = pair.exchange();
    let cancelled = outcome(&actions, transfer).expect("finished");
    assert!(matches!(
        cancelled,
        Outcome::Cancelled {
            destination: Destination::Invalid
        }
    ));
    assert!(!quiesced(&actions, transfer));
    assert!(actions.iter().any(|a| matches!(a, Action::Stop { .. })));
    assert_eq!(pair.owner.live_claims(), 1);
    pair.initiator.moved(pair.now, transfer, Ok(64));
    pair.initiator.moved(pair.now, transfer, Ok(64));
    let (actions, _) = pair.exchange();
    assert!(quiesced(&actions, transfer) && outcome(&actions, transfer).is_none());
    assert_eq!(pair.initiator.stats().stray_moves, 1);
    // The slot is free again.
    let again = pair.begin(&reference, 0, 4, (0, 2));
    pair.exchange();
    assert_eq!(pair.initiator.transfer_state(again), Some(TransferState::Moving));
}

#[test]
fn cancel_before_the_grant_leaves_the_destination_untouched() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 1);
    let transfer = pair.begin(&reference, 0, 4, (0, 2));
    pair.initiator.cancel(pair.now, transfer);
    let (actions, _) = pair.exchange();
    let cancelled = outcome(&actions, transfer).expect("finished");
    assert!(matches!(
        cancelled,
        Outcome::Cancelled {
            destination: Destination::Untouched
        }
    ));
    assert!(quiesced(&actions, transfer));
    assert!(!actions.iter().any(|a| matches!(a, Action::Move { .. })));
    assert_eq!(
        (pair.owner.live_claims(), pair.initiator.stats().stray_messages),
        (0, 1)
    );
}

#[test]
fn a_timeout_fences_before_it_frees() {
    let mut pair = Pair::new();
    let (_, transfer) = moving(&mut pair, ExportKind::Export);
    let (actions, _) = pair.pass(S * 11);
    assert_eq!(
        failure(&actions, transfer),
        (ErrorKind::TransferTimeout, Destination::Invalid)
    );
    assert!(!quiesced(&actions, transfer));
    assert_eq!(pair.owner.live_claims(), 0, "the owner's own deadline frees the claim");
    pair.initiator.moved(pair.now, transfer, stopped());
    let (actions, _) = pair.exchange();
    assert!(quiesced(&actions, transfer));
}

#[test]
fn release_while_bytes_move_fails_the_fence() {
    let mut pair = Pair::new();
    let (reference, transfer) = moving(&mut pair, ExportKind::Export);
    // The fence is asked for before the revocation arrives.
    pair.initiator.moved(pair.now, transfer, Ok(1));
    pair.owner.release(pair.now, reference.export_id).expect("alive");
    assert_eq!(pair.owner.export_state(reference.export_id), ExportState::Released);
    let (actions, _) = pair.exchange();
    assert_eq!(
        failure(&actions, transfer),
        (ErrorKind::ReferenceReleased, Destination::Invalid)
    );
}

#[test]
fn a_claim_keeps_an_export_pinned_past_its_lease() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 2);
    pair.pass(S * 29);
    let transfer = pair.begin(&reference, 0, 4, (0, 2));
    let (_, owner) = pair.pass(S * 5);
    assert!(owner.iter().any(|a| matches!(
        a,
        Action::ExportChanged {
            state: ExportState::Expiring,
            ..
        }
    )));
    pair.initiator.moved(pair.now, transfer, Ok(1));
    let (actions, owner) = pair.exchange();
    assert!(matches!(outcome(&actions, transfer), Some(Outcome::Done { .. })));
    assert!(owner.iter().any(|a| matches!(
        a,
        Action::ExportChanged {
            state: ExportState::Expired,
            ..
        }
    )));
}

#[test]
fn renewal_extends_a_lease_and_never_shortens_it() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 1);
    pair.pass(S * 20);
    let request = pair
        .initiator
        .renew_remote(pair.now, TO_OWNER, reference.clone(), S * 60)
        .expect("up");
    let (actions, _) = pair.exchange();
    let answer = actions.iter().find_map(|a| match a {
        Action::Renewed { request: r, result, .. } if *r == request => result.as_ref().ok(),
        _ => None,
    });
    assert_eq!(answer, Some(&(S * 60)));
    assert_eq!(
        pair.owner.renew(pair.now, reference.export_id, S).expect("alive"),
        S * 60
    );
    pair.pass(S * 59);
    assert_eq!(pair.owner.export_state(reference.export_id), ExportState::Active);
    pair.pass(S * 2);
    assert_eq!(pair.owner.export_state(reference.export_id), ExportState::Expired);
    pair.initiator
        .renew_remote(pair.now, TO_OWNER, reference, S)
        .expect("up");
    let (actions, _) = pair.exchange();
    let refusal = actions.iter().find_map(|a| match a {
        Action::Renewed { result: Err(error), .. } => Some(error.kind()),
        _ => None,
    });
    assert_eq!(refusal, Some(ErrorKind::ReferenceExpired));
}

#[test]
fn an_offer_is_reusable_only_when_its_writer_is_out() {
    let mut pair = Pair::new();
    let (offer, transfer) = moving(&mut pair, ExportKind::Offer);
    pair.owner.release(pair.now, offer.export_id).expect("alive");
    let (actions, _) = pair.exchange();
    assert_eq!(
        failure(&actions, transfer),
        (ErrorKind::ReferenceReleased, Destination::Invalid)
    );
    pair.pass(S * 60);
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Releasing);
    pair.initiator.moved(pair.now, transfer, stopped());
    pair.exchange();
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Released);
}

#[test]
fn a_lost_writer_keeps_its_offer_until_it_is_known_dead() {
    let mut pair = Pair::new();
    let (offer, transfer) = moving(&mut pair, ExportKind::Offer);
    let lost = Error::new(ErrorKind::PeerLost, "read", "connection reset");
    pair.initiator.peer_down(pair.now, TO_OWNER, &lost);
    pair.owner.peer_down(pair.now, TO_INITIATOR, &lost);
    let (actions, owner) = pair.exchange();
    assert_eq!(failure(&actions, transfer), (ErrorKind::PeerLost, Destination::Invalid));
    assert!(owner.iter().any(|a| matches!(a, Action::ServeStop { .. })));
    pair.pass(S * 60);
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Expiring);
    pair.owner.writer_dead(pair.now, TO_INITIATOR);
    pair.exchange();
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Expired);
    assert_eq!(pair.owner.live_claims(), 0);
}

#[test]
fn a_writer_that_connects_again_says_that_it_is_out() {
    let mut pair = Pair::new();
    let (offer, transfer) = moving(&mut pair, ExportKind::Offer);
    let lost = Error::new(ErrorKind::PeerLost, "read", "connection reset");
    pair.initiator.peer_down(pair.now, TO_OWNER, &lost);
    pair.owner.peer_down(pair.now, TO_INITIATOR, &lost);
    pair.owner.release(pair.now, offer.export_id).expect("alive");
    pair.exchange();
    // A new channel between the same lives, while the mover is still in the memory.
    let (to_owner, to_initiator) = (PeerKey(33), PeerKey(44));
    let (owner, initiator) = (common::remote(&pair.owner), common::remote(&pair.initiator));
    pair.initiator.peer_up(pair.now, to_owner, Role::Initiator, owner);
    pair.owner.peer_up(pair.now, to_initiator, Role::Owner, initiator);
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Releasing);
    assert!(
        pair.initiator.poll_action().is_none(),
        "nothing to say before the mover is out"
    );
    pair.initiator.moved(pair.now, transfer, stopped());
    let Some(Action::Send { peer, message }) = pair.initiator.poll_action() else {
        panic!("the owner is told");
    };
    assert_eq!(peer, to_owner);
    pair.owner.handle(pair.now, to_initiator, message).expect("honest");
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Released);
}

#[test]
fn a_writer_whose_last_word_was_lost_is_asked_again() {
    let mut pair = Pair::new();
    let (offer, transfer) = moving(&mut pair, ExportKind::Offer);
    // The owner loses the channel, the writer doesn't know that yet: its mover meets a closed stream and
    // what it says about that goes nowhere.
    let lost = Error::new(ErrorKind::PeerLost, "read", "connection reset");
    pair.owner.peer_down(pair.now, TO_INITIATOR, &lost);
    pair.owner.release(pair.now, offer.export_id).expect("alive");
    let (to_owner, to_initiator) = (PeerKey(33), PeerKey(44));
    let (owner, initiator) = (common::remote(&pair.owner), common::remote(&pair.initiator));
    while pair.owner.poll_action().is_some() {}
    pair.initiator.peer_up(pair.now, to_owner, Role::Initiator, owner);
    while pair.initiator.poll_action().is_some() {}
    pair.owner.peer_up(pair.now, to_initiator, Role::Owner, initiator);
    let Some(Action::Send { message, .. }) = pair.owner.poll_action() else {
        panic!("the writer is asked");
    };
    assert!(matches!(&message, Message::Revoke(revoke) if revoke.transfer == transfer));
    pair.initiator.handle(pair.now, to_owner, message).expect("honest");
    assert!(pair.initiator.poll_action().is_none(), "it is not out yet");
    pair.initiator.moved(pair.now, transfer, stopped());
    pair.initiator.peer_down(pair.now, TO_OWNER, &lost);
    while pair.initiator.poll_action().is_some() {}
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Releasing);
    // The owner asks again on its own, and this time there is an answer.
    pair.now += S * 2;
    pair.owner.tick(pair.now);
    let mut asked = false;
    while let Some(action) = pair.owner.poll_action() {
        if let Action::Send {
            peer,
            message: message @ Message::Revoke(_),
        } = action
        {
            assert_eq!(peer, to_initiator);
            asked = true;
            pair.initiator.handle(pair.now, to_owner, message).expect("honest");
        }
    }
    assert!(asked);
    while let Some(action) = pair.initiator.poll_action() {
        if let Action::Send {
            message: message @ Message::Abandon(_),
            ..
        } = action
        {
            pair.owner.handle(pair.now, to_initiator, message).expect("honest");
        }
    }
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Released);
}

#[test]
fn closing_a_channel_ends_its_transfers_and_says_goodbye() {
    let mut pair = Pair::new();
    let (_, transfer) = moving(&mut pair, ExportKind::Export);
    pair.initiator.close_peer(pair.now, TO_OWNER, "shutting down");
    let (actions, owner) = pair.exchange();
    assert_eq!(failure(&actions, transfer), (ErrorKind::Closed, Destination::Invalid));
    assert!(matches!(owner.last(), Some(Action::Close { .. })), "{owner:?}");
    assert_eq!(pair.owner.live_claims(), 0);
}

#[test]
fn the_fence_waits_for_the_owners_own_streams() {
    let mut pair = Pair::new();
    let (offer, transfer) = moving(&mut pair, ExportKind::Offer);
    assert!(pair.owner.serve_started(TO_INITIATOR, transfer).is_some());
    pair.initiator.moved(pair.now, transfer, Ok(1));
    let (actions, _) = pair.pass(S * 3);
    assert!(outcome(&actions, transfer).is_none());
    pair.owner.serve_ended(pair.now, TO_INITIATOR, transfer, Ok(()));
    let (actions, _) = pair.exchange();
    assert!(matches!(outcome(&actions, transfer), Some(Outcome::Done { .. })));
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Filled);
    assert!(pair.owner.serve_started(TO_INITIATOR, transfer).is_none());
}

#[test]
fn a_stream_is_refused_for_the_reason_that_ended_its_claim() {
    for kind in [ExportKind::Export, ExportKind::Offer] {
        let mut pair = Pair::new();
        let (reference, transfer) = moving(&mut pair, kind);
        pair.owner.release(pair.now, reference.export_id).expect("alive");
        assert!(pair.owner.serve_started(TO_INITIATOR, transfer).is_none());
        let refusal = pair.owner.why_ended(TO_INITIATOR, transfer);
        assert_eq!(refusal.kind(), ErrorKind::ReferenceReleased, "{kind:?}");
    }
}

#[test]
fn a_failed_stream_of_the_owner_reaches_the_initiator() {
    let mut pair = Pair::new();
    let (_, transfer) = moving(&mut pair, ExportKind::Export);
    pair.owner.serve_started(TO_INITIATOR, transfer).expect("alive");
    let error = Error::new(ErrorKind::Transfer, "stream", "broken pipe");
    pair.owner.serve_ended(pair.now, TO_INITIATOR, transfer, Err(error));
    let (actions, _) = pair.exchange();
    assert_eq!(failure(&actions, transfer), (ErrorKind::Transfer, Destination::Invalid));
}

/// Runs the initiator's timers for so long, and nothing else: not a word comes from the other side.
fn alone(pair: &mut Pair, time: Duration) -> Vec<Action> {
    let end = pair.now + time;
    while let Some(next) = pair.initiator.next_deadline().filter(|&next| next <= end) {
        pair.initiator.tick(next);
    }
    pair.initiator.tick(end);
    pair.now = end;
    std::iter::from_fn(|| pair.initiator.poll_action()).collect()
}

#[test]
fn silence_closes_the_channel_and_ends_what_hung_on_it() {
    let mut pair = Pair::new();
    let (_, transfer) = moving(&mut pair, ExportKind::Export);
    let actions = alone(&mut pair, S * 6);
    assert!(matches!(actions.last(), Some(Action::Close { .. })));
    assert_eq!(failure(&actions, transfer), (ErrorKind::PeerLost, Destination::Invalid));
    assert_eq!(pair.initiator.stats().peers_silent, 1);
}

#[test]
fn whoever_stood_still_itself_gives_the_peer_time_to_speak() {
    let mut pair = Pair::new();
    // As after a pause of the machine that both are on.
    pair.now += S * 60;
    pair.initiator.tick(pair.now);
    assert_eq!(pair.initiator.stats().peers_silent, 0);
    let (actions, _) = pair.pass(S * 6);
    assert!(
        !actions.iter().any(|action| matches!(action, Action::Close { .. })),
        "{actions:?}"
    );
    // Once more, and now the peer is gone: half its time is what it gets.
    pair.now += S * 60;
    pair.initiator.tick(pair.now);
    let actions = alone(&mut pair, S * 2);
    assert!(
        !actions.iter().any(|action| matches!(action, Action::Close { .. })),
        "{actions:?}"
    );
    let actions = alone(&mut pair, S);
    assert!(matches!(actions.last(), Some(Action::Close { .. })), "{actions:?}");
    assert_eq!(pair.initiator.stats().peers_silent, 1);
}

#[test]
fn a_revocation_of_what_we_never_had_is_answered_quiesced() {
    let mut pair = Pair::new();
    let fault = Fault {
        kind: ErrorKind::ReferenceReleased,
        message: String::new(),
        hint: String::new(),
    };
    let revoke = Message::Revoke(Revoke {
        transfer: TransferId(77),
        fault,
    });
    pair.initiator
        .handle(pair.now, TO_OWNER, revoke)
        .expect("not a violation");
    let answer = pair.initiator.poll_action();
    assert!(
        matches!(
            answer,
            Some(Action::Send {
                message: Message::Abandon(_),
                ..
            })
        ),
        "{answer:?}"
    );
}

#[test]
fn a_lost_done_is_asked_for_again() {
    let mut pair = Pair::new();
    let (_, transfer) = moving(&mut pair, ExportKind::Export);
    pair.initiator.moved(pair.now, transfer, Ok(1));
    let lost = pair.initiator.poll_action();
    assert!(matches!(
        lost,
        Some(Action::Send {
            message: Message::Done(_),
            ..
        })
    ));
    let (actions, _) = pair.pass(S * 2);
    assert!(matches!(outcome(&actions, transfer), Some(Outcome::Done { .. })));
    assert_eq!(pair.initiator.stats().fences_reasked, 1);
}

#[test]
fn messages_from_the_wrong_side_are_violations() {
    let mut pair = Pair::new();
    let ack = Message::Ack(Ack {
        transfer: TransferId(1),
    });
    let error = pair
        .owner
        .handle(pair.now, TO_INITIATOR, ack)
        .expect_err("owners send acks");
    assert_eq!(error.kind(), ErrorKind::Handshake);
}

#[test]
fn an_ack_before_the_fence_changes_nothing() {
    let mut pair = Pair::new();
    let (_, transfer) = moving(&mut pair, ExportKind::Export);
    pair.initiator
        .handle(pair.now, TO_OWNER, Message::Ack(Ack { transfer }))
        .expect("counted");
    assert_eq!(pair.initiator.transfer_state(transfer), Some(TransferState::Moving));
    assert_eq!(pair.initiator.stats().stray_messages, 1);
}

#[test]
fn an_unanswered_renewal_ends() {
    let config = NodeConfig {
        peer_timeout: S * 5,
        ..NodeConfig::default()
    };
    let mut pair = Pair::with(config);
    let reference = pair.export(ExportKind::Export, 1, 1, 1);
    pair.initiator
        .renew_remote(pair.now, TO_OWNER, reference, S)
        .expect("up");
    assert!(
        matches!(pair.initiator.poll_action(), Some(Action::Send { .. })),
        "and it is lost"
    );
    let (actions, _) = pair.pass(S * 6);
    assert!(
        actions
            .iter()
            .any(|a| matches!(a, Action::Renewed { result: Err(_), .. }))
    );
}

#[test]
fn zero_blocks_are_a_transfer_like_any_other() {
    let mut pair = Pair::new();
    for kind in [ExportKind::Export, ExportKind::Offer] {
        let reference = pair.export(kind, 0, 2, 1);
        let transfer = pair.begin(&reference, 0, 0, (0, 2));
        pair.exchange();
        pair.initiator.moved(pair.now, transfer, Ok(0));
        let (actions, _) = pair.exchange();
        assert!(matches!(outcome(&actions, transfer), Some(Outcome::Done { bytes: 0 })));
    }
    assert_eq!(pair.owner.live_exports(), 0);
}
