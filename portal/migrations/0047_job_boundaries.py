"""The account of a node's agent has the form that the enrolment script accepts."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0040_kept_places")]

    operations = [
        migrations.AddConstraint(
            model_name="node",
            constraint=models.CheckConstraint(
                condition=models.Q(("account__regex", "^[a-z][a-z0-9-]{0,30}$")), name="node_account"
            ),
        ),
    ]
