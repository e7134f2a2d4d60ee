//! Two nodes, a perfect network: pull, push, and each end of an export.

mod common;

use common::{Pair, S, outcome};
use pdkv_core::node::{Action, ExportState, Outcome};
use pdkv_core::reference::ExportKind;

#[test]
fn a_pull_is_claimed_moved_fenced_and_quiesced() {
    let mut pair = Pair::new();
    let reference = pair.export(ExportKind::Export, 4, 2, 1);
    let transfer = pair.begin(&reference, 0, 4, (0, 2));
    let (initiator, _) = pair.exchange();
    let grant = initiator.iter().find_map(|a| match a {
        Action::Move { grant, .. } => Some(grant.clone()),
        _ => None,
    });
    assert_eq!(grant.expect("a grant").blocks.expect("a table").len(), 4);
    pair.initiator.moved(S, transfer, Ok(128));
    let (initiator, owner) = pair.exchange();
    assert!(matches!(
        outcome(&initiator, transfer),
        Some(Outcome::Done { bytes: 128 })
    ));
    assert!(matches!(initiator.last(), Some(Action::Quiesced { .. })));
    assert!(owner.iter().any(|a| matches!(
        a,
        Action::ExportChanged {
            state: ExportState::Done,
            ..
        }
    )));
    assert_eq!(pair.owner.export_state(reference.export_id), ExportState::Done);
    assert_eq!(
        (
            pair.owner.live_exports(),
            pair.owner.live_claims(),
            pair.initiator.live_transfers()
        ),
        (0, 0, 0)
    );
}

#[test]
fn an_offer_is_filled_in_parts_and_each_part_once() {
    let mut pair = Pair::new();
    let offer = pair.export(ExportKind::Offer, 4, 2, 1);
    let parts = [(0, 4, (0, 1)), (0, 2, (1, 1)), (2, 2, (1, 1))];
    for (first, count, layers) in parts {
        assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Active);
        let transfer = pair.begin(&offer, first, count, layers);
        pair.exchange();
        let again = pair.begin(&offer, first, 1, layers);
        let (initiator, _) = pair.exchange();
        assert!(matches!(outcome(&initiator, again), Some(Outcome::Failed { .. })));
        pair.initiator.moved(S, transfer, Ok(1));
        let (initiator, _) = pair.exchange();
        assert!(matches!(outcome(&initiator, transfer), Some(Outcome::Done { .. })));
    }
    assert_eq!(pair.owner.export_state(offer.export_id), ExportState::Filled);
}
