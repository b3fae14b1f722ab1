"""Sends a mail for each order, and notes in the target that it was sent."""

import os
import smtplib
from email.message import EmailMessage

from relay import Delivery, Fail

HOST, _, PORT = os.environ.get("SMTP", "localhost:25").partition(":")


def send(delivery: Delivery) -> None:
    """A plain function: relay calls it in a thread."""
    with smtplib.SMTP(HOST, int(PORT), timeout=delivery.seconds_left) as server:
        for event in delivery.events:
            if not event.payload.get("email"):
                raise Fail("the order has no address")
            mail = EmailMessage()
            mail["From"], mail["To"] = "shop@shop.example", event.payload["email"]
            mail["Subject"] = f"Your order {event.aggregate_id}"
            # The same in each attempt: many mail servers drop a repetition.
            mail["Message-ID"] = f"<{event.id}@shop.example>"
            mail.set_content("Thank you.")
            server.send_message(mail)
    with delivery.transaction() as conn:
        for event in delivery.events:
            conn.execute(
                "insert into sent_mails values (%s, %s)", (event.id, event.payload["email"])
            )
    delivery.log.info("mail sent")
